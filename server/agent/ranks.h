// The ranks of this node: one keeper process each (keeper.h), started on orders, adopted after a restart, and the exits
// that hierad has not acknowledged yet. State on disk: FOLDER/ranks/NAME.sock (a living keeper), NAME.exit (how a rank
// ended). One thread; nothing here blocks for long except Open, which may wait some seconds for keepers of a dead agent.
#pragma once

#include <poll.h>

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/fs.h"
#include "base/limits.h"
#include "hierad/v1/agent.pb.h"
#include "base/account.h"
#include "server/agent/rank_name.h"

namespace hierad {

class Ranks {
 public:
  struct Options {
    std::string state_folder;
    std::string worker;        // path of hiera-worker
    std::string agent_id;      // of the state folder, kept for ever: marks the processes of its ranks
    std::string server;        // what the agent dials, and so its ranks
    std::string worker_certificates;   // folder, handed to the ranks; for a server at host:port
    RankRights rights;         // whose account ranks run as
    std::string cgroup_home;   // where ranks get control groups; empty: they get none
    int64_t memory_max = 0;    // bytes of each rank's group; 0: no limit
    int64_t log_bytes = limits::kLogFileBytes;   // of rank-N.log, before it is moved aside
    std::string address;       // of this node, for ranks of other nodes; empty: the one on the way to `server`
  };

  // Adopts the ranks that a former agent left with "goodbye"; kills what is left of others and records their end.
  static absl::StatusOr<std::unique_ptr<Ranks>> Open(const Options& options);

  // Starts what is listed and not there, ends what is there and not listed, forgets what is acknowledged. The same
  // orders again change nothing. A rank that has ended is never started a second time.
  void Apply(const v1::AgentOrders& orders);

  // Running, and ended but not acknowledged.
  std::vector<v1::RankProcess> Snapshot() const;
  int running() const;

  // Descriptors to wait for; then OnReady for each that is. True: the snapshot has changed.
  void AppendPollFds(std::vector<pollfd>* fds) const;
  bool OnReady(int fd);

  // Before the agent leaves: the keepers stay, and wait for the next agent.
  void SayGoodbye();
  // Ends every rank: SIGTERM, after `grace` SIGKILL to the whole tree; 0: at once.
  void EndAll(std::chrono::milliseconds grace);

 private:
  struct Entry {
    v1::RankProcess process;
    UniqueFd keeper;           // none: ended
    bool term_sent = false, kill_sent = false;
  };

  explicit Ranks(const Options& options) : options_(options) {}
  absl::Status Adopt();
  bool AdoptKeeper(const RankName& name);
  void AdoptExit(const RankName& name);
  void Start(const v1::Assignment& assignment);
  absl::StatusOr<UniqueFd> SpawnKeeper(const RankName& name, const v1::Assignment& assignment);
  void End(Entry* entry, std::chrono::milliseconds grace);
  void Forget(const RankName& name);
  void OnKeeperGone(const RankName& name, Entry* entry);
  void Record(const RankName& name, Entry* entry, int signal, v1::Reason reason, const std::string& words);
  void KillMarked(const std::function<bool(const RankName&)>& whose) const;
  void KillGroups(const std::function<bool(const RankName&)>& whose) const;
  std::string Path(const RankName& name, const char* suffix) const;
  std::string Marker(const RankName& name) const { return name.ToString() + "." + options_.agent_id; }

  const Options options_;
  std::string folder_;
  UniqueFd folder_fd_;
  std::map<RankName, Entry> entries_;
  // Acknowledged; kept so that late orders start none of them again. Bounded: the oldest are dropped.
  std::set<RankName> forgotten_;
  std::deque<RankName> forgotten_order_;
};

// The environment of a rank's processes: the agent's own, with what PyTorch's tools call things (RANK, LOCAL_RANK,
// WORLD_SIZE, LOCAL_WORLD_SIZE), the slot's device and threads, kRankVariable = `marker`, and the account's HOME, USER, LOGNAME.
std::vector<std::string> RankEnvironment(const v1::Assignment& assignment, const std::string& marker,
                                         const char* const* inherited, const std::optional<Account>& account = std::nullopt);

}  // namespace hierad
