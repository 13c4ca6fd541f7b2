// Inputs of the API's targets are frames: a byte that says what it is, two bytes of length (little endian), a message as on the
// wire. The mutator changes fields of these messages, so that more than their encoding is tried.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "google/protobuf/message.h"

namespace hierad {

struct Frame {
  uint8_t kind = 0;
  std::string payload;
};
constexpr size_t kMaxFrames = 24;
std::vector<Frame> SplitFrames(std::string_view input);   // whatever the input is; at most kMaxFrames
std::string JoinFrames(const std::vector<Frame>& frames);

// One change, of one field somewhere in it, drawn by `seed`.
void MutateMessage(google::protobuf::Message* message, unsigned seed);
// For libFuzzer: the same on a frame of an input of `target`, or on its frames. None: it is not of the API's targets.
using MessageMaker = std::unique_ptr<google::protobuf::Message> (*)(uint8_t kind);
std::string MutateFrames(std::string_view input, MessageMaker make, unsigned seed);

}  // namespace hierad
