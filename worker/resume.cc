#include "worker/resume.h"

#include <fcntl.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/fs.h"
#include "base/job_paths.h"
#include "base/status.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/comm/agree.h"

namespace hierad {
namespace {

// What travels beside the buffers.
struct Head {
  int64_t resumed = 0, step = 0, updates = 0, nan_steps_in_row = 0, has_eval_loss = 0, has_best = 0, mean = 0, std = 0, ema = 0;
  double eval_loss = 0, best_eval_loss = 0;
  LossScale loss_scale;
};

absl::StatusOr<StartingPoint> ReadHere(const std::string& run_folder, const ParameterTable& table, int64_t known_step) {
  StartingPoint start;
  auto contents = ReadNewest(run_folder, table, &start.damaged);
  if (contents.ok()) {
    start.resumed = true;
    start.contents = *std::move(contents);
  } else if (!absl::IsNotFound(contents.status())) {
    return contents.status();
  } else if (known_step > 0) {
    return ErrorOf(v1::REASON_CHECKPOINT,
                   absl::StrCat("hierad knows of a checkpoint of step ", known_step, ", but there is none in \"", Printable(run_folder),
                                "/checkpoints\"; is the folder mounted on this node?"));
  }
  return start;
}

template <typename T>
absl::Status Share(Communicator* communicator, std::vector<T>* data, int64_t size) {
  data->resize(size_t(size));
  return communicator->BroadcastHost(data->data(), size * int64_t(sizeof(T)), 0);
}

}  // namespace

absl::StatusOr<StartingPoint> ReadStartingPoint(const std::string& run_folder, const ParameterTable& table, int64_t known_step,
                                                Communicator* communicator) {
  absl::StatusOr<StartingPoint> here = StartingPoint{};
  if (communicator->rank() == 0) here = ReadHere(run_folder, table, known_step);
  RETURN_IF_ERROR(Agree(communicator, here.status()));
  StartingPoint& start = *here;
  CheckpointContents& c = start.contents;
  Head head{start.resumed, c.state.step, c.state.updates, c.state.nan_steps_in_row, c.eval_loss.has_value(), c.has_best,
            int64_t(c.statistics.mean.size()), int64_t(c.statistics.std.size()), int64_t(c.state.ema.size()),
            c.eval_loss.value_or(0), c.best_eval_loss, c.state.loss_scale};
  RETURN_IF_ERROR(communicator->BroadcastHost(&head, sizeof head, 0));
  if (head.resumed == 0) return here;
  start.resumed = true;
  c.state.step = head.step;
  c.state.updates = head.updates;
  c.state.nan_steps_in_row = head.nan_steps_in_row;
  c.state.loss_scale = head.loss_scale;
  if (head.has_eval_loss != 0) c.eval_loss = head.eval_loss;
  c.has_best = head.has_best != 0;
  c.best_eval_loss = head.best_eval_loss;
  RETURN_IF_ERROR(Share(communicator, &c.statistics.mean, head.mean));
  RETURN_IF_ERROR(Share(communicator, &c.statistics.std, head.std));
  for (auto* flat : {&c.state.parameters, &c.state.exp_avg, &c.state.exp_avg_sq}) {
    RETURN_IF_ERROR(Share(communicator, flat, table.flat_size));
  }
  RETURN_IF_ERROR(Share(communicator, &c.state.ema, head.ema));
  return here;
}

absl::StatusOr<std::string> ApplyInitialWeights(const std::string& path, const ParameterTable& table, TrainState* state) {
  const auto opened = OpenJobPath(path, O_RDONLY);
  const auto file = opened.ok() ? ReadSafetensors(*opened, path) : absl::StatusOr<SafetensorsFile>(opened.status());
  if (!file.ok()) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("model.init_from: ", std::string(file.status().message())));
  size_t taken = 0;
  for (const Parameter& p : table.parameters) {
    const auto found = file->tensors.find(p.name);
    if (found == file->tensors.end()) continue;
    if (found->second.shape != p.shape) {
      return ErrorOf(v1::REASON_USER_ERROR,
                     absl::StrCat("model.init_from: \"", p.name, "\" in \"", Printable(path), "\" has shape [",
                                  absl::StrJoin(found->second.shape, ", "), "], the job's model [", absl::StrJoin(p.shape, ", "),
                                  "]; give the model the sizes of the weights"));
    }
    std::copy(found->second.data.begin(), found->second.data.end(), state->parameters.begin() + p.offset);
    ++taken;
  }
  if (taken == 0) {
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("model.init_from: \"", Printable(path), "\" holds none of the model's parameters (such as \"",
                                                       table.parameters.empty() ? "" : table.parameters[0].name, "\")"));
  }
  state->ema.clear();   // begins anew from what the weights are now
  return absl::StrCat("initial weights from ", Printable(path), ": ", taken, " of ", table.parameters.size(), " parameters, ",
                      file->tensors.size() - taken, " tensors of the file not used");
}

}  // namespace hierad
