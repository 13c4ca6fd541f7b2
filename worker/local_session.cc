#include "worker/session.h"

namespace hierad {
namespace {

class LocalSession : public Session {
 public:
  void SetPhase(v1::Phase) override {}
  void SetProgress(int64_t, int64_t, int64_t) override {}
  void SetCounters(int64_t, double) override {}
  void SetTotals(const v1::RankTotals&) override {}
  void SetDataCounters(const v1::DataCounters&) override {}
  void SetWaitingIn(std::function<std::string()>) override {}
  void AddMetrics(const v1::StepMetrics&) override {}
  void SetCheckpoints(const std::vector<v1::CheckpointInfo>&) override {}
  void OfferRendezvous(const std::string&) override {}
  absl::StatusOr<std::string> AwaitRendezvous(std::chrono::milliseconds) override {
    return absl::InternalError("a run without hierad has one rank");
  }
  Want want() const override { return Want::kRun; }
  int64_t checkpoint_request() const override { return 0; }
  double peak_lr() const override { return 0; }
  void AbandonOnStop(std::atomic<bool>*) override {}
  bool End(v1::Reason, const std::string&, std::chrono::milliseconds) override { return true; }
};

}  // namespace

std::unique_ptr<Session> MakeLocalSession() { return std::make_unique<LocalSession>(); }

}  // namespace hierad
