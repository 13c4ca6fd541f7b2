#include "tests/fuzz/api_frames.h"

#include <algorithm>
#include <limits>
#include <random>

namespace hierad {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;
using Random = std::mt19937;

size_t Below(Random* random, size_t n) { return (*random)() % n; }

int64_t Number(Random* random, int64_t old) {
  constexpr int64_t kSome[] = {0, 1, -1, 2, 7, 64, 100, 1 << 16, std::numeric_limits<int32_t>::max(), std::numeric_limits<int32_t>::min(),
                               std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()};
  switch (Below(random, 4)) {
    case 0: return int64_t(uint64_t(old) + 1);
    case 1: return int64_t(uint64_t(old) - 1);
    case 2: return int64_t((*random)() % 1000);
    default: return kSome[Below(random, std::size(kSome))];
  }
}

double Real(Random* random, double old) {
  const double some[] = {0, -0.0, 1, -1, 1e-300, 1e300, 5e-324, std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                         std::numeric_limits<double>::quiet_NaN(), old * 2, old / 2};
  return some[Below(random, std::size(some))];
}

std::string Text(Random* random, std::string old) {
  static const char* const kSome[] = {"", "a", "/", "/tmp/x", "..", "/tmp/../etc", "auto", "npy", "cpu-0", "node", "64", "0.5", "\xff\xfe", "\x1b[2J", "a\nb", "gpu"};
  switch (Below(random, 6)) {
    case 0: return old + old;
    case 1: return old.substr(0, Below(random, old.size() + 1));
    case 2: return std::string(Below(random, 600), 'x');
    case 3:
      if (!old.empty()) old[Below(random, old.size())] = char((*random)());
      return old;
    case 4: return old + '\0';
    default: return kSome[Below(random, std::size(kSome))];
  }
}

void MutateField(Message* message, const FieldDescriptor* field, Random* random);

void MutateAny(Message* message, Random* random) {
  const auto* descriptor = message->GetDescriptor();
  if (descriptor->field_count() == 0) return;
  MutateField(message, descriptor->field(int(Below(random, size_t(descriptor->field_count())))), random);
}

// A repeated field grows, shrinks, or one of its elements changes.
void MutateRepeated(Message* message, const FieldDescriptor* field, Random* random) {
  const Reflection* r = message->GetReflection();
  const int size = r->FieldSize(*message, field);
  const size_t what = Below(random, 4);
  if (what == 0 && size > 0) return r->RemoveLast(message, field);
  const int at = size == 0 ? 0 : int(Below(random, size_t(size)));
  const bool add = what == 1 || size == 0;
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE: {
      Message* element = add ? r->AddMessage(message, field) : r->MutableRepeatedMessage(message, field, at);
      if (add && size > 0 && Below(random, 2) == 0) element->CopyFrom(r->GetRepeatedMessage(*message, field, at));
      return MutateAny(element, random);
    }
    case FieldDescriptor::CPPTYPE_STRING:
      if (add) return r->AddString(message, field, Text(random, size == 0 ? "" : r->GetRepeatedString(*message, field, at)));
      return r->SetRepeatedString(message, field, at, Text(random, r->GetRepeatedString(*message, field, at)));
    case FieldDescriptor::CPPTYPE_INT32: return add ? r->AddInt32(message, field, int32_t(Number(random, 0))) : r->SetRepeatedInt32(message, field, at, int32_t(Number(random, r->GetRepeatedInt32(*message, field, at))));
    case FieldDescriptor::CPPTYPE_INT64: return add ? r->AddInt64(message, field, Number(random, 0)) : r->SetRepeatedInt64(message, field, at, Number(random, r->GetRepeatedInt64(*message, field, at)));
    case FieldDescriptor::CPPTYPE_BOOL: return add ? r->AddBool(message, field, Below(random, 2) == 0) : r->SetRepeatedBool(message, field, at, !r->GetRepeatedBool(*message, field, at));
    case FieldDescriptor::CPPTYPE_DOUBLE: return add ? r->AddDouble(message, field, Real(random, 1)) : r->SetRepeatedDouble(message, field, at, Real(random, r->GetRepeatedDouble(*message, field, at)));
    case FieldDescriptor::CPPTYPE_ENUM: return add ? r->AddEnumValue(message, field, int(Below(random, 16))) : r->SetRepeatedEnumValue(message, field, at, int(Number(random, 0)));
    default: return;   // no repeated field of another kind in proto/
  }
}

void MutateField(Message* message, const FieldDescriptor* field, Random* random) {
  if (field->is_repeated()) return MutateRepeated(message, field, random);
  const Reflection* r = message->GetReflection();
  if (Below(random, 12) == 0) return r->ClearField(message, field);
  switch (field->cpp_type()) {
    case FieldDescriptor::CPPTYPE_MESSAGE: return MutateAny(r->MutableMessage(message, field), random);
    case FieldDescriptor::CPPTYPE_STRING: return r->SetString(message, field, Text(random, r->GetString(*message, field)));
    case FieldDescriptor::CPPTYPE_INT32: return r->SetInt32(message, field, int32_t(Number(random, r->GetInt32(*message, field))));
    case FieldDescriptor::CPPTYPE_INT64: return r->SetInt64(message, field, Number(random, r->GetInt64(*message, field)));
    case FieldDescriptor::CPPTYPE_UINT32: return r->SetUInt32(message, field, uint32_t(Number(random, int64_t(r->GetUInt32(*message, field)))));
    case FieldDescriptor::CPPTYPE_UINT64: return r->SetUInt64(message, field, uint64_t(Number(random, int64_t(r->GetUInt64(*message, field)))));
    case FieldDescriptor::CPPTYPE_BOOL: return r->SetBool(message, field, !r->GetBool(*message, field));
    case FieldDescriptor::CPPTYPE_FLOAT: return r->SetFloat(message, field, float(Real(random, r->GetFloat(*message, field))));
    case FieldDescriptor::CPPTYPE_DOUBLE: return r->SetDouble(message, field, Real(random, r->GetDouble(*message, field)));
    case FieldDescriptor::CPPTYPE_ENUM: return r->SetEnumValue(message, field, Below(random, 8) == 0 ? int(Number(random, 0)) : int(Below(random, 16)));
  }
}

}  // namespace

std::vector<Frame> SplitFrames(std::string_view input) {
  std::vector<Frame> frames;
  while (input.size() >= 3 && frames.size() < kMaxFrames) {
    const size_t length = uint8_t(input[1]) | size_t{uint8_t(input[2])} << 8;
    frames.push_back({uint8_t(input[0]), std::string(input.substr(3, length))});
    input.remove_prefix(std::min(input.size(), 3 + length));
  }
  return frames;
}

std::string JoinFrames(const std::vector<Frame>& frames) {
  std::string joined;
  for (const Frame& frame : frames) {
    const std::string payload = frame.payload.substr(0, 0xFFFF);
    joined += {char(frame.kind), char(payload.size() & 0xFF), char(payload.size() >> 8)};
    joined += payload;
  }
  return joined;
}

void MutateMessage(Message* message, unsigned seed) {
  Random random(seed);
  MutateAny(message, &random);
}

std::string MutateFrames(std::string_view input, MessageMaker make, unsigned seed) {
  Random random(seed);
  std::vector<Frame> frames = SplitFrames(input);
  const size_t what = Below(&random, 10);
  if (frames.empty() || (what == 0 && frames.size() < kMaxFrames)) {
    frames.insert(frames.begin() + long(Below(&random, frames.size() + 1)), Frame{uint8_t(random()), ""});
  } else if (what == 1) {
    frames.erase(frames.begin() + long(Below(&random, frames.size())));
  } else if (what == 2 && frames.size() < kMaxFrames) {
    const Frame copy = frames[Below(&random, frames.size())];
    frames.insert(frames.begin() + long(Below(&random, frames.size() + 1)), copy);
  } else {
    Frame& frame = frames[Below(&random, frames.size())];
    if (what == 3) frame.kind = uint8_t(random());
    if (const auto message = make(frame.kind)) {
      (void)message->ParsePartialFromString(frame.payload);   // as much of it as there is
      for (size_t n = 1 + Below(&random, 3); n > 0; --n) MutateMessage(message.get(), unsigned(random()));
      frame.payload = message->SerializePartialAsString();
    } else {
      frame.payload = Text(&random, frame.payload);
    }
  }
  return JoinFrames(frames);
}

}  // namespace hierad
