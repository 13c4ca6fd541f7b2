// The screen of `hierctl top`: jobs with their loss curves and step budgets, slots, alerts. Pure; one thread.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "client/context.h"
#include "hierad/v1/control.pb.h"

namespace hierad {

class TopView {
 public:
  explicit TopView(const Context& context) : context_(context) {}

  void SetJobs(const v1::ListReply& jobs);   // newest first, as List answers
  void SetNodes(const v1::NodesReply& nodes) { nodes_ = nodes; }
  // Steps of a job from step NextStep on, oldest first.
  void AddSteps(uint64_t job_id, const std::vector<v1::StepMetrics>& steps);
  int64_t NextStep(uint64_t job_id) const;   // the first that is not known here

  // Jobs in the order shown: with workers, queued, then the newest ended; at most `most`.
  std::vector<v1::Job> Shown(size_t most) const;
  // Lines with '\n', none wider than the terminal, at most `rows`.
  std::string Block(int rows) const;

 private:
  struct Curve {
    std::vector<double> losses;   // thinned to every second one when full
    int64_t stride = 1, seen = 0, last_step = 0;
  };
  std::string Head() const;
  std::string JobLine(const v1::Job& job) const;
  std::string BudgetLine(const v1::Job& job) const;
  std::string InputLine(const v1::Job& job) const;

  const Context& context_;
  v1::ListReply jobs_;
  v1::NodesReply nodes_;
  std::map<uint64_t, Curve> curves_;
};

// A bar of `columns` cells, each phase with its share: letters w(ait) f(orward) b(ackward) c(omm) o(ptimizer) and '.' for the
// rest; with colour also painted. Empty: the totals tell nothing yet.
std::string BudgetBar(const v1::RankTotals& totals, int columns, bool color);

}  // namespace hierad
