// What hierad must not forget, in SQLite (WAL, synchronous=FULL): a Commit that returned OK survives a kill and a power
// cut. One owner, one thread at a time. The file belongs to one hierad (the caller holds the folder's lock).
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/job_row.h"

struct sqlite3;
struct sqlite3_stmt;

namespace hierad {

struct AttemptRow {
  uint64_t job_id = 0;
  int attempt = 0;
  int64_t started_ms = 0, ended_ms = 0;
  v1::Reason reason = v1::REASON_UNSPECIFIED;
  std::string message;
  int64_t step = 0;
  std::string nodes;   // of its ranks, in their order, with a space between; empty: it did not begin, or an older hierad kept none
};

// A slot that gets no more work.
struct FaultySlot {
  std::string node, slot;
  std::string fault;   // what its card had, for people
};

// One transaction: all or nothing.
struct StoreBatch {
  struct Job {
    const JobRow* row;
    bool ranks = true;         // rewrite its ranks
    bool checkpoints = true;   // rewrite its checkpoints
  };
  std::vector<Job> jobs;
  std::vector<AttemptRow> attempts;
};

struct ListFilter {
  std::vector<v1::JobState> states;   // empty: all
  std::string submitter;              // empty: of anyone
  uint64_t before_id = 0;             // 0: from the newest
  int limit = 1000;
};

class Store {
 public:
  // Creates or migrates. `lock_wait_ms`: how long another program's lock on the file is waited out.
  // FailedPrecondition: the file is of a newer hierad, or it is no hierad store.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const std::string& path, int lock_wait_ms = 20000);
  // The same with another schema text: for tests of migration.
  static absl::StatusOr<std::unique_ptr<Store>> OpenWithSchema(const std::string& path, std::string_view schema,
                                                               int lock_wait_ms);
  ~Store();
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // Counts this start; larger than at every earlier one.
  absl::StatusOr<uint64_t> BeginEpoch(int64_t now_ms);
  uint64_t next_job_id() const { return next_job_id_; }   // larger than any ever stored
  absl::Status Commit(const StoreBatch& batch);

  absl::StatusOr<std::vector<JobRow>> LoadLive();          // not terminal, in order of id
  absl::StatusOr<std::optional<JobRow>> Load(uint64_t job_id);
  absl::StatusOr<std::optional<uint64_t>> FindByClientKey(const std::string& key);
  absl::StatusOr<std::vector<JobRow>> List(const ListFilter& filter);   // newest first; without ranks and checkpoints
  absl::StatusOr<std::vector<AttemptRow>> Attempts(uint64_t job_id);    // oldest first
  // Ended jobs that used this run folder, newest first.
  absl::StatusOr<std::vector<uint64_t>> JobsOfFolder(const std::string& run_folder);
  absl::StatusOr<std::vector<std::string>> DrainedNodes();
  absl::Status SetDrained(const std::string& node, bool drained);   // a transaction of its own
  absl::StatusOr<std::vector<FaultySlot>> FaultySlots();
  // Transactions of their own.
  absl::Status AddFaultySlot(const FaultySlot& slot);
  absl::Status ForgetFaultySlots(const std::string& node);
  absl::Status ForgetCheckpoints(uint64_t job_id);                  // a transaction of its own
  // Jobs by state, all of them.
  absl::StatusOr<std::vector<std::pair<v1::JobState, int64_t>>> CountByState();

 private:
  class Statement;
  explicit Store(sqlite3* db, std::string path) : db_(db), path_(std::move(path)) {}
  absl::Status Run(const char* sql);
  absl::Status Migrate(std::string_view schema);
  absl::Status WriteJob(const StoreBatch::Job& job);
  absl::Status WriteAttempt(const AttemptRow& attempt);
  absl::Status LoadParts(JobRow* row);
  absl::Status Error(const char* what) const;

  sqlite3* db_;
  std::string path_;
  std::map<std::string, sqlite3_stmt*> statements_;   // not in use
  uint64_t next_job_id_ = 1;
};

}  // namespace hierad
