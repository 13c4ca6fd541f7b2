#include "worker/probe/probe.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/fs.h"
#include "base/job_validate.h"
#include "base/job_yaml.h"
#include "base/status.h"
#include "worker/checkpoint/checkpoint.h"
#include "worker/comm/communicator.h"
#include "worker/probe/logistic.h"
#include "worker/probe/probe_samples.h"

namespace hierad {
namespace {

constexpr int kFolds = 5;
constexpr int64_t kBatch = 64;

absl::StatusOr<v1::JobSpec> ReadRun(const ProbeOptions& options) {
  const std::string path = JoinPath(options.run_folder, "job.yaml");
  if (!Exists(path)) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(Printable(options.run_folder), " is not a run: no job.yaml in it"));
  ASSIGN_OR_RETURN(v1::JobSpec spec, ReadJobYaml(path));
  FillDefaults(&spec);
  RETURN_IF_ERROR(CheckJob(spec));
  if (spec.data().source() == "synthetic") return ErrorOf(v1::REASON_USER_ERROR, "the run trained on synthetic data, which has nothing to probe");
  // Features are computed by one process with nothing captured, in fp32.
  spec.mutable_resources()->set_ranks(1);
  spec.mutable_resources()->set_device(options.cuda ? "cuda" : "cpu");
  spec.mutable_step()->set_batch_per_rank(kBatch);
  spec.mutable_step()->set_accumulation(1);
  spec.mutable_step()->set_precision("fp32");
  if (spec.step().mode() != "eager") spec.mutable_step()->set_mode("optimized");
  return spec;
}

absl::Status FindSplits(const ProbeOptions& options, const v1::JobSpec& spec, ProbeReport* report) {
  report->train_path = options.train_path.empty() ? spec.data().path() : options.train_path;
  report->test_path = options.test_path;
  if (report->test_path.empty()) report->test_path = spec.eval().path();
  if (report->test_path.empty()) {
    const std::string guess = absl::StrReplaceAll(report->train_path, {{"TRAIN", "TEST"}, {"Train", "Test"}, {"train", "test"}});
    if (guess == report->train_path || !Exists(guess))
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("no TEST split: the job has no eval.path and there is no ", Printable(guess == report->train_path ? "file named like TRAIN's with TEST" : guess), "; name it by --test"));
    report->test_path = guess;
  }
  return absl::OkStatus();
}

// Chooses the strength on TRAIN, fits, measures.
ProbeRow Measure(const std::string& name, const LabelledRows& train, const LabelledRows& test, const std::vector<int>& fold_N) {
  const ChosenStrength chosen = ChooseStrength(train, fold_N, kFolds);
  const Standardization scale = Standardization::Of(train);
  const LabelledRows train_scaled = scale.Apply(train);
  const LogisticModel model = FitLogistic(train_scaled, chosen.c);
  return {name, train.width, chosen.c, chosen.accuracy, model.Accuracy(train_scaled), model.Accuracy(scale.Apply(test))};
}

ProbeRow Majority(const ProbeSamples& train, const ProbeSamples& test) {
  const auto share = [](const std::vector<int32_t>& labels, int32_t of) { return static_cast<double>(std::count(labels.begin(), labels.end(), of)) / labels.size(); };
  int32_t most = 0;
  for (size_t k = 1; k < train.class_names.size(); ++k)
    if (share(train.labels_N, static_cast<int32_t>(k)) > share(train.labels_N, most)) most = static_cast<int32_t>(k);
  const double on_train = share(train.labels_N, most);
  return {"majority class", 0, 0, on_train, on_train, share(test.labels_N, most)};
}

std::string Verdict(const ProbeReport& report) {
  const ProbeRow& own = report.rows[0];
  const ProbeRow* best = &report.rows[1];
  std::string against;
  for (size_t i = 1; i < report.rows.size(); ++i) {
    const ProbeRow& row = report.rows[i];
    if (row.test_accuracy > best->test_accuracy) best = &row;
    absl::StrAppend(&against, i == 1 ? "" : i + 1 < report.rows.size() ? ", " : " and ", absl::StrFormat("%+.1f", 100 * (own.test_accuracy - row.test_accuracy)), " against ",
                    row.name == "majority class" ? "the majority class" : row.name == "raw linear" ? "a linear model on the raw signal" : "a random encoder");
  }
  const double error = std::sqrt(own.test_accuracy * (1 - own.test_accuracy) / report.test_samples);
  std::string verdict = absl::StrFormat("Pre-trained features: %.1f%% of %d TEST samples (sampling error %.1f points); in points, %s.", 100 * own.test_accuracy, report.test_samples, 100 * error, against);
  if (best->test_accuracy > own.test_accuracy)
    absl::StrAppendFormat(&verdict, " A control wins: %s is better by %.1f points, so pre-training did not pay off here.", best->name, 100 * (best->test_accuracy - own.test_accuracy));
  else if (best->test_accuracy == own.test_accuracy)
    absl::StrAppend(&verdict, " A control (", best->name, ") is as good, so pre-training did not pay off here.");
  else if (own.test_accuracy - best->test_accuracy < error)
    absl::StrAppend(&verdict, " The lead over ", best->name, " is less than one sampling error: judge by several seeds.");
  return verdict;
}

}  // namespace

absl::StatusOr<ProbeReport> RunProbe(const ProbeOptions& options, const StepFactory& make_step) {
  ProbeReport report;
  report.run_folder = options.run_folder;
  ASSIGN_OR_RETURN(const v1::JobSpec spec, ReadRun(options));
  RETURN_IF_ERROR(FindSplits(options, spec, &report));
  ASSIGN_OR_RETURN(const Geometry geometry, Geometry::From(spec.model()));
  const ParameterTable table = ParameterTable::For(geometry);
  ASSIGN_OR_RETURN(const CheckpointContents checkpoint, ReadNewest(options.run_folder, table, &report.damaged));
  report.step = checkpoint.state.step;

  ChannelStatistics statistics = checkpoint.statistics;
  std::set<std::string> seen;
  ASSIGN_OR_RETURN(const ProbeSamples train, ReadProbeSamples(spec, report.train_path, geometry, &statistics, options.threads, &seen));
  ASSIGN_OR_RETURN(ProbeSamples test, ReadProbeSamples(spec, report.test_path, geometry, &statistics, options.threads, &seen));
  RETURN_IF_ERROR(MatchClasses(train, &test));
  report.train_samples = train.count();
  report.test_samples = test.count();
  report.train_copies = train.copies;
  report.test_copies = test.copies;
  report.classes = train.class_names;

  const auto communicator = MakeSelfCommunicator();
  ASSIGN_OR_RETURN(const std::unique_ptr<Step> step, make_step({spec, options.cuda, options.threads}, geometry, table, communicator.get()));
  const auto classes = static_cast<int32_t>(train.class_names.size());
  const LabelledRows raw = RawRows(train, geometry, classes);
  std::vector<int64_t> groups_N;
  for (int64_t index : train.indices_N)
    if (options.group_size > 0) groups_N.push_back(index / options.group_size);
  ASSIGN_OR_RETURN(const std::vector<int> fold_N, MakeFolds(raw, groups_N, kFolds));

  const auto encoder = [&](const std::string& name) -> absl::StatusOr<ProbeRow> {
    ASSIGN_OR_RETURN(const LabelledRows train_rows, EncoderRows(train, kBatch, classes, step.get()));
    ASSIGN_OR_RETURN(const LabelledRows test_rows, EncoderRows(test, kBatch, classes, step.get()));
    return Measure(name, train_rows, test_rows, fold_N);
  };
  RETURN_IF_ERROR(step->Load(checkpoint.state));
  ASSIGN_OR_RETURN(ProbeRow pretrained, encoder("pre-trained"));
  RETURN_IF_ERROR(step->Initialize());
  ASSIGN_OR_RETURN(ProbeRow random, encoder("random encoder"));
  report.rows = {std::move(pretrained), std::move(random), Measure("raw linear", raw, RawRows(test, geometry, classes), fold_N), Majority(train, test)};
  report.verdict = Verdict(report);
  return report;
}

std::string ProbeReport::Table() const {
  std::string out = absl::StrFormat("Linear probe of %s, step %d\nTRAIN %d samples, TEST %d samples, %d classes; strength by %d-fold cross-validation on TRAIN\n",
                                    PrintableSentence(run_folder), step, train_samples, test_samples, classes.size(), kFolds);
  if (train_copies + test_copies > 0)
    absl::StrAppend(&out, "Left out as exact copies of earlier samples: ", train_copies, " of TRAIN, ", test_copies, " of TEST\n");
  for (const std::string& path : damaged) absl::StrAppend(&out, "Not used, damaged: ", PrintableSentence(path), "\n");
  absl::StrAppendFormat(&out, "\n%-16s %9s %8s %9s %9s %9s\n", "", "features", "C", "CV", "TRAIN", "TEST");
  for (const ProbeRow& row : rows) {
    if (row.features == 0) {
      absl::StrAppendFormat(&out, "%-16s %9s %8s %9s %9.3f %9.3f\n", row.name, "-", "-", "-", row.train_accuracy, row.test_accuracy);
    } else {
      absl::StrAppendFormat(&out, "%-16s %9d %8g %9.3f %9.3f %9.3f\n", row.name, row.features, row.c, row.cv_accuracy, row.train_accuracy, row.test_accuracy);
    }
  }
  return absl::StrCat(out, "\n", verdict, "\n");
}

std::string ProbeReport::Json() const {
  nlohmann::ordered_json json = {{"run_folder", run_folder}, {"step", step}, {"train", {{"path", train_path}, {"samples", train_samples}, {"copies_left_out", train_copies}}},
                                 {"test", {{"path", test_path}, {"samples", test_samples}, {"copies_left_out", test_copies}}}, {"classes", classes}, {"folds", kFolds}};
  for (const ProbeRow& row : rows) {
    nlohmann::ordered_json entry = {{"name", row.name}, {"features", row.features}};
    if (row.features > 0) entry.update({{"c", row.c}, {"cv_accuracy", row.cv_accuracy}});
    entry.update({{"train_accuracy", row.train_accuracy}, {"test_accuracy", row.test_accuracy}});
    json["rows"].push_back(entry);
  }
  json["damaged_checkpoints"] = damaged;
  json["verdict"] = verdict;
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace hierad
