// The linear probe of a finished run: how much of the labels a straight line reads from the frozen encoder's features,
// beside three controls on the very same samples: the same encoder with the random weights that training began with, a
// linear model on the raw signal, and the most frequent class. Everything is chosen on TRAIN; TEST is only measured.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "base/plan/parameters.h"
#include "hierad/v1/job.pb.h"
#include "worker/step/step.h"

namespace hierad {

struct ProbeOptions {
  std::string run_folder;               // with job.yaml and checkpoints/
  std::string train_path, test_path;    // empty: data.path; eval.path, else data.path with TRAIN replaced by TEST
  int64_t group_size = 0;               // > 0: this many consecutive TRAIN samples share a cross-validation fold
  bool cuda = false;
  int threads = 1;
};

struct ProbeRow {
  std::string name;                 // "pre-trained", "random encoder", "raw linear", "majority class"
  int64_t features = 0;             // 0: none
  double c = 0;                     // chosen strength
  double cv_accuracy = 0;           // 5-fold, on TRAIN, at c
  double train_accuracy = 0, test_accuracy = 0;
};

struct ProbeReport {
  std::string run_folder, train_path, test_path;
  int64_t step = 0;                 // of the checkpoint
  int64_t train_samples = 0, test_samples = 0;
  int64_t train_copies = 0, test_copies = 0;   // exact copies of an earlier sample, left out
  std::vector<std::string> classes;
  std::vector<ProbeRow> rows;       // pre-trained first
  std::vector<std::string> damaged; // checkpoints that could not be used
  std::string verdict;              // in words; says so where a control wins

  std::string Table() const;
  std::string Json() const;
};

// Makes a step for the run's model; the worker's is MakeStep.
using StepFactory = std::function<absl::StatusOr<std::unique_ptr<Step>>(const StepOptions&, const Geometry&,
                                                                        const ParameterTable&, Communicator*)>;

// USER_ERROR: no run there, no checkpoint, no labels, a class of TEST that TRAIN lacks.
absl::StatusOr<ProbeReport> RunProbe(const ProbeOptions& options, const StepFactory& make_step);

}  // namespace hierad
