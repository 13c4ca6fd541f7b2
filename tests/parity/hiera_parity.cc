// hiera-parity: our engine behind a line protocol, for tests/parity. One JSON request a line on stdin, one JSON reply a
// line on stdout; tensors travel in files that the request names. One model at a time; no gRPC.
//   {"cmd": "table", "model": {ModelSpec}}                      -> {"parameters": [{name, shape, decay}]}
//   {"cmd": "build", "model", "step", "optimizer", "seed", "device", "threads", "weights": F} -> {"describe": "..."}
//   {"cmd": "draw", "epoch", "visits": [...], "out": F}         draws of the built model: masks, drop path, dropout
//   {"cmd": "run" | "train", "epoch", "inputs": F, "out": F}, {"cmd": "trace", "epoch", "inputs": F} -> {"trace": [...]}
//   {"cmd": "init" | "kept" | "masks", ...}                     -> see the functions
// A reply {"refused": sentence} is the engine's own refusal; {"error": text} is a fault.
#include <google/protobuf/util/json_util.h>

#include <exception>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>

#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "tests/parity/engine_under_test.h"
#include "tests/parity/tensor_file.h"
#include "worker/model/draws.h"
#include "worker/model/initialize.h"

namespace hierad::parity {
namespace {

using Json = nlohmann::json;

v1::ModelSpec ModelOf(const Json& request) {
  v1::ModelSpec spec;
  const auto status = google::protobuf::util::JsonStringToMessage(request.at("model").dump(), &spec);
  if (!status.ok()) throw std::runtime_error("model: " + std::string(status.message()));
  return spec;
}

Json Refusal(const absl::Status& status) { return {{"refused", std::string(status.message())}}; }

Json Table(const Json& request) {
  const absl::StatusOr<Geometry> geometry = Geometry::From(ModelOf(request));
  if (!geometry.ok()) return Refusal(geometry.status());
  Json parameters = Json::array();
  for (const Parameter& p : ParameterTable::For(*geometry).parameters) {
    parameters.push_back({{"name", p.name}, {"shape", p.shape}, {"decay", p.decay}});
  }
  return {{"parameters", parameters}};
}

Json Init(const Json& request) {
  const absl::StatusOr<Geometry> geometry = Geometry::From(ModelOf(request));
  if (!geometry.ok()) return Refusal(geometry.status());
  const ParameterTable table = ParameterTable::For(*geometry);
  std::vector<float> flat(table.flat_size);
  InitializeParameters(table, request.at("seed").get<uint64_t>(), flat.data());
  TensorMap tensors;
  for (const Parameter& p : table.parameters) {
    tensors[p.name] = at::from_blob(flat.data() + p.offset, p.shape, at::kFloat).clone();
  }
  WriteTensors(request.at("out"), tensors);
  return {{"ok", true}};
}

Json Kept(const Json& request) {
  Json kept = Json::array();
  for (const Json& pair : request.at("pairs")) kept.push_back(KeptMaskUnits(pair[0].get<int64_t>(), pair[1].get<double>()));
  return {{"kept", kept}};
}

// Masks of visits 0 .. draws - 1: how often each unit, and each unit with its successor, is kept.
Json Masks(const Json& request) {
  const int64_t n = request.at("units"), kept = request.at("kept"), draws = request.at("draws");
  const uint64_t seed = request.at("seed");
  std::vector<int64_t> counts(n), neighbours(n), units(n), rank(n), again(n), rank_again(n);
  int64_t wrong_size = 0, changed = 0;
  for (int64_t visit = 0; visit < draws; ++visit) {
    const RandomStream stream{seed, Draw::kMask, uint32_t(visit % 7), uint64_t(visit)};
    DrawMaskUnits(stream, n, kept, units.data(), rank.data());
    int64_t size = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool is_kept = rank[i] < kept;
      size += is_kept;
      counts[i] += is_kept;
      neighbours[i] += is_kept && rank[(i + 1) % n] < kept;
      wrong_size += units[rank[i]] != i;
    }
    wrong_size += size != kept;
    if (visit % 1000 == 0) {
      DrawMaskUnits(stream, n, kept, again.data(), rank_again.data());
      changed += again != units || rank_again != rank;
    }
  }
  return {{"counts", counts}, {"neighbours", neighbours}, {"wrong_size", wrong_size}, {"same_alone", changed == 0}};
}

Json Answer(const Json& request, std::unique_ptr<EngineUnderTest>* engine) {
  const std::string cmd = request.at("cmd");
  if (cmd == "table") return Table(request);
  if (cmd == "init") return Init(request);
  if (cmd == "kept") return Kept(request);
  if (cmd == "masks") return Masks(request);
  if (cmd == "build") {
    engine->reset();
    auto built = EngineUnderTest::Build(request, ReadTensors(request.at("weights")));
    if (!built.ok()) return Refusal(built.status());
    *engine = *std::move(built);
    return {{"describe", (*engine)->Describe()}};
  }
  if (!*engine) throw std::runtime_error(cmd + " before build");
  const uint32_t epoch = request.at("epoch");
  if (cmd == "draw") {
    WriteTensors(request.at("out"), (*engine)->Draw(epoch, request.at("visits")));
    return {{"ok", true}};
  }
  const TensorMap inputs = ReadTensors(request.at("inputs"));
  if (cmd == "trace") return {{"trace", (*engine)->Trace(inputs, epoch)}};
  if (cmd == "run" || cmd == "train") {
    WriteTensors(request.at("out"), cmd == "run" ? (*engine)->Run(inputs, epoch) : (*engine)->Train(inputs, epoch));
    return {{"ok", true}};
  }
  throw std::runtime_error("unknown cmd " + cmd);
}

}  // namespace
}  // namespace hierad::parity

int main() {
  std::unique_ptr<hierad::parity::EngineUnderTest> engine;
  std::string line;
  while (std::getline(std::cin, line)) {
    nlohmann::json reply;
    try {
      reply = hierad::parity::Answer(nlohmann::json::parse(line), &engine);
    } catch (const std::exception& error) {
      reply = {{"error", std::string(error.what()).substr(0, 2000)}};
    }
    std::cout << reply.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
  }
}
