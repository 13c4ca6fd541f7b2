// Prometheus' view: /metrics over HTTP. Every scrape asks the coordinator, so a job's series leave some minutes after its
// end, a rank's with its attempt. The metrics are those of metric_table.h.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/metric_family.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/coordinator.h"
#include "server/job_cost.h"

namespace prometheus {
class Exposer;
}

namespace hierad {

// `text` as a label's value: valid UTF-8 (other bytes become U+FFFD), at most 128 bytes, cut between characters.
std::string CleanLabel(const std::string& text);

struct ExporterOptions {
  std::string version, commit;
  std::string state_folder, runs_folder;   // whose disks are shown; empty: not
};
struct ScrapeCount {
  int64_t scrapes = 0;
  double seconds = 0;
};

// What a scrape shows for this overview. `costs` null: nothing of the plan.
std::vector<prometheus::MetricFamily> FamiliesOf(const Overview& overview, const ExporterOptions& options, const ScrapeCount& scrapes, JobCosts* costs);

class Exporter {
 public:
  // Listens at once; answers with no metrics until Serve. The message of a failure names the address and the cause.
  static absl::StatusOr<std::unique_ptr<Exporter>> Listen(const std::string& address);
  ~Exporter();

  // `look` is called on HTTP threads, and may block for a moment.
  void Serve(std::function<absl::StatusOr<Overview>()> look, ExporterOptions options);
  int port() const;   // for address with port 0

 private:
  Exporter();
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::shared_ptr<prometheus::Collectable> collectable_;
};

}  // namespace hierad
