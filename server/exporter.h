// Prometheus' view: /metrics over HTTP. Every scrape asks the coordinator, so a job's series end with the job.
// The list of metrics is docs/metrics.md.
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

namespace prometheus {
class Exposer;
}

namespace hierad {

// `text` as a label's value: valid UTF-8 (other bytes become U+FFFD), at most 128 bytes, cut between characters.
std::string CleanLabel(const std::string& text);

// What a scrape shows for this overview. Pure.
std::vector<prometheus::MetricFamily> FamiliesOf(const Overview& overview, const std::string& version, const std::string& commit);

class Exporter {
 public:
  // Listens at once; answers with no metrics until Serve. The message of a failure names the address and the cause.
  static absl::StatusOr<std::unique_ptr<Exporter>> Listen(const std::string& address);
  ~Exporter();

  // `look` is called on HTTP threads, and may block for a moment.
  void Serve(std::function<absl::StatusOr<Overview>()> look, std::string version, std::string commit);
  int port() const;   // for address with port 0

 private:
  Exporter();
  std::unique_ptr<prometheus::Exposer> exposer_;
  std::shared_ptr<prometheus::Collectable> collectable_;
};

}  // namespace hierad
