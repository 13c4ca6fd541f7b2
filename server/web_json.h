// The JSON of the web page's answers. Numbers that are not finite are the strings "NaN", "Infinity", "-Infinity".
#pragma once

#include <nlohmann/json.hpp>

#include "hierad/v1/control.pb.h"
#include "server/history.h"

namespace hierad {

nlohmann::json WebNumber(double value);
nlohmann::json WebSummary(const v1::Job& job);   // a line of the list
nlohmann::json WebDetail(const v1::Job& job);
nlohmann::json WebNode(const v1::Node& node);
nlohmann::json WebPoints(const HistorySteps& steps);
std::string WebText(const nlohmann::json& json);   // valid UTF-8, whatever the strings hold

}  // namespace hierad
