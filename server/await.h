// From the coordinator's callbacks to a thread that waits.
#pragma once

#include <future>
#include <memory>

#include "absl/status/statusor.h"

namespace hierad {

// Asks by `ask(reply)` and waits; the coordinator answers every question, also while it stops.
template <typename T, typename AskFunction>
absl::StatusOr<T> Await(AskFunction ask) {
  auto promise = std::make_shared<std::promise<absl::StatusOr<T>>>();
  std::future<absl::StatusOr<T>> future = promise->get_future();
  ask([promise](absl::StatusOr<T> answer) { promise->set_value(std::move(answer)); });
  return future.get();
}

}  // namespace hierad
