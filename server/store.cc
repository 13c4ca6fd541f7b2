#include "server/store.h"

#include <sqlite3.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "server/schema.h"

namespace hierad {

// A prepared statement; parameters and columns are numbered in order of use. Prepared once for each text, and kept.
class Store::Statement {
 public:
  Statement(Store* store, std::string sql) : store_(store), sql_(std::move(sql)) {
    // Taken out: a second use at the same time has one of its own.
    if (auto kept = store->statements_.extract(sql_)) {
      statement_ = kept.mapped();
    } else {
      code_ = sqlite3_prepare_v2(store->db_, sql_.c_str(), -1, &statement_, nullptr);
    }
  }
  ~Statement() {
    if (statement_ == nullptr) return;
    sqlite3_reset(statement_);
    sqlite3_clear_bindings(statement_);
    if (store_->statements_.size() >= kStatements || !store_->statements_.emplace(sql_, statement_).second) sqlite3_finalize(statement_);
  }
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& Bind(int64_t value) {
    if (code_ == SQLITE_OK) code_ = sqlite3_bind_int64(statement_, ++bound_, value);
    return *this;
  }
  Statement& Bind(const std::string& value) {
    if (code_ == SQLITE_OK) code_ = sqlite3_bind_text(statement_, ++bound_, value.data(), static_cast<int>(value.size()), SQLITE_TRANSIENT);
    return *this;
  }
  Statement& BindBlob(const google::protobuf::MessageLite& message) {
    const std::string bytes = message.SerializeAsString();
    if (code_ == SQLITE_OK) code_ = sqlite3_bind_blob(statement_, ++bound_, bytes.data(), static_cast<int>(bytes.size()), SQLITE_TRANSIENT);
    return *this;
  }
  Statement& Bind(const std::optional<double>& value) {
    ++bound_;
    if (code_ == SQLITE_OK) code_ = value ? sqlite3_bind_double(statement_, bound_, *value) : sqlite3_bind_null(statement_, bound_);
    return *this;
  }

  // True: a row is there. False: no more, or an error (see Finish).
  bool Next() {
    if (code_ != SQLITE_OK && code_ != SQLITE_ROW) return false;
    code_ = sqlite3_step(statement_);
    column_ = 0;
    return code_ == SQLITE_ROW;
  }
  int64_t Int() { return sqlite3_column_int64(statement_, column_++); }
  std::string Text() {
    const auto* data = static_cast<const char*>(sqlite3_column_blob(statement_, column_));
    const int size = sqlite3_column_bytes(statement_, column_++);
    return size > 0 ? std::string(data, size) : std::string();
  }
  std::optional<double> Real() {
    const int column = column_++;
    if (sqlite3_column_type(statement_, column) == SQLITE_NULL) return std::nullopt;
    return sqlite3_column_double(statement_, column);
  }
  template <typename Message>
  bool Parse(Message* message) {
    return message->ParseFromString(Text());
  }
  // OK once every row was read.
  absl::Status Finish(const char* what) {
    while (Next()) {
    }
    return code_ == SQLITE_DONE ? absl::OkStatus() : store_->Error(what);
  }

 private:
  static constexpr size_t kStatements = 64;   // lists by state make the most

  Store* store_;
  const std::string sql_;
  sqlite3_stmt* statement_ = nullptr;
  int code_ = SQLITE_OK;
  int bound_ = 0;
  int column_ = 0;
};

namespace {

constexpr char kJobColumns[] =
    "id, client_key, submitter, spec, run_folder, state, desired, attempt, reason, message, submitted_ms, started_ms, "
    "finished_ms, retry_at_ms, failures, failed_reason, failed_step, killed_outside, credential, step, total_steps, "
    "first_step, nan_steps, best_eval_loss";

template <typename S>
bool ReadJob(S* row, JobRow* job) {
  job->id = row->Int();
  job->client_key = row->Text();
  job->submitter = row->Text();
  const bool parsed = row->Parse(&job->spec);
  job->run_folder = row->Text();
  job->state = static_cast<v1::JobState>(row->Int());
  job->desired = static_cast<v1::DesiredState>(row->Int());
  job->attempt = static_cast<int>(row->Int());
  job->reason = static_cast<v1::Reason>(row->Int());
  job->message = row->Text();
  job->submitted_ms = row->Int();
  job->started_ms = row->Int();
  job->finished_ms = row->Int();
  job->retry_at_ms = row->Int();
  job->failures = static_cast<int>(row->Int());
  job->failed_reason = static_cast<v1::Reason>(row->Int());
  job->failed_step = row->Int();
  job->killed_outside = row->Int() != 0;
  job->credential = row->Text();
  job->step = row->Int();
  job->total_steps = row->Int();
  job->first_step = row->Int();
  job->nan_steps = row->Int();
  job->best_eval_loss = row->Real();
  return parsed;
}

}  // namespace

absl::Status Store::Error(const char* what) const {
  const int code = sqlite3_errcode(db_) & 0xff;
  const std::string where = absl::StrCat(what, " ", path_, ": ", sqlite3_errmsg(db_));
  switch (code) {
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
      return absl::UnavailableError(absl::StrCat(where, "; another program holds a lock on it: find it with fuser, and end it"));
    case SQLITE_FULL:
      return absl::ResourceExhaustedError(absl::StrCat(where, "; make room on its disk, then try again"));
    case SQLITE_NOTADB:
    case SQLITE_CORRUPT:
      return absl::DataLossError(absl::StrCat(where, "; restore it from a backup, or give another state folder"));
    case SQLITE_READONLY:
    case SQLITE_CANTOPEN:
    case SQLITE_PERM:
      return absl::PermissionDeniedError(absl::StrCat(where, "; hierad must be able to write its state folder"));
    default:
      return absl::InternalError(where);
  }
}

absl::Status Store::Run(const char* sql) {
  if (sqlite3_exec(db_, sql, nullptr, nullptr, nullptr) != SQLITE_OK) return Error("cannot use the store");
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Store>> Store::Open(const std::string& path, int lock_wait_ms) {
  return OpenWithSchema(path, kSchemaSql, lock_wait_ms);
}

absl::StatusOr<std::unique_ptr<Store>> Store::OpenWithSchema(const std::string& path, std::string_view schema, int lock_wait_ms) {
  sqlite3* db = nullptr;
  const int code = sqlite3_open_v2(path.c_str(), &db, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_NOMUTEX, nullptr);
  if (db == nullptr) return absl::ResourceExhaustedError("out of memory for SQLite");
  std::unique_ptr<Store> store(new Store(db, path));
  if (code != SQLITE_OK) return store->Error("cannot open the store");
  chmod(path.c_str(), 0600);   // it holds the attempts' credentials
  sqlite3_busy_timeout(db, lock_wait_ms);
  if (absl::Status s = store->Run("PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL; PRAGMA foreign_keys=ON; PRAGMA journal_size_limit=67108864;"); !s.ok()) return s;
  if (absl::Status s = store->Migrate(schema); !s.ok()) return s;
  Statement largest(store.get(), "SELECT max(coalesce((SELECT max(id) FROM jobs), 0), coalesce((SELECT seq FROM sqlite_sequence WHERE name = 'jobs'), 0))");
  if (largest.Next()) store->next_job_id_ = largest.Int() + 1;
  if (absl::Status s = largest.Finish("cannot read"); !s.ok()) return s;
  // At work the event loop must not stand still for long.
  sqlite3_busy_timeout(db, std::min(lock_wait_ms, 5000));
  return store;
}

Store::~Store() {
  for (const auto& [sql, statement] : statements_) sqlite3_finalize(statement);
  sqlite3_close(db_);
}

// Applies the sections "-- version N" above the file's user_version, each in its own transaction.
absl::Status Store::Migrate(std::string_view schema) {
  constexpr std::string_view kMark = "\n-- version ";
  int64_t have = 0;
  {
    Statement version(this, "PRAGMA user_version");
    if (version.Next()) have = version.Int();
    if (absl::Status s = version.Finish("cannot read"); !s.ok()) return s;
  }
  if (have == 0) {
    Statement tables(this, "SELECT count(*) FROM sqlite_master");
    const bool foreign = tables.Next() && tables.Int() > 0;
    if (absl::Status s = tables.Finish("cannot read"); !s.ok()) return s;
    if (foreign) return absl::FailedPreconditionError(absl::StrCat(path_, " is a database, but not hierad's; give another state folder"));
  }
  int64_t newest = 0;
  for (size_t at = schema.find(kMark); at != std::string_view::npos;) {
    const size_t next = schema.find(kMark, at + 1);
    const std::string section(schema.substr(at + kMark.size(), next == std::string_view::npos ? next : next - at - kMark.size()));
    at = next;
    const size_t line = section.find('\n');
    const int64_t version = std::stoll(section.substr(0, line));
    newest = std::max(newest, version);
    if (version <= have) continue;
    const std::string sql = absl::StrCat("BEGIN IMMEDIATE;\n", section.substr(line + 1), "\n;PRAGMA user_version=", version, ";\nCOMMIT;");
    if (absl::Status s = Run(sql.c_str()); !s.ok()) {
      sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
      return s;
    }
  }
  if (have > newest) {
    return absl::FailedPreconditionError(absl::StrCat(path_, " has schema version ", have, ", this hierad knows up to ", newest,
                                                      "; it was written by a newer hierad: use that one"));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> Store::BeginEpoch(int64_t now_ms) {
  Statement insert(this, "INSERT INTO starts (started_ms) VALUES (?)");
  if (absl::Status s = insert.Bind(now_ms).Finish("cannot write"); !s.ok()) return s;
  const uint64_t epoch = sqlite3_last_insert_rowid(db_);
  Statement trim(this, "DELETE FROM starts WHERE epoch <= ?");
  if (absl::Status s = trim.Bind(static_cast<int64_t>(epoch) - 100).Finish("cannot write"); !s.ok()) return s;
  return epoch;
}

absl::Status Store::WriteJob(const StoreBatch::Job& job) {
  const JobRow& r = *job.row;
  Statement write(this,
      absl::StrCat("INSERT INTO jobs (", kJobColumns, ") VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?,?) "
      "ON CONFLICT (id) DO UPDATE SET spec=excluded.spec, state=excluded.state, desired=excluded.desired, attempt=excluded.attempt, reason=excluded.reason, "
      "message=excluded.message, started_ms=excluded.started_ms, finished_ms=excluded.finished_ms, "
      "retry_at_ms=excluded.retry_at_ms, failures=excluded.failures, failed_reason=excluded.failed_reason, "
      "failed_step=excluded.failed_step, killed_outside=excluded.killed_outside, credential=excluded.credential, "
      "step=excluded.step, total_steps=excluded.total_steps, first_step=excluded.first_step, "
      "nan_steps=excluded.nan_steps, best_eval_loss=excluded.best_eval_loss"));
  write.Bind(r.id).Bind(r.client_key).Bind(r.submitter).BindBlob(r.spec).Bind(r.run_folder).Bind(r.state).Bind(r.desired)
      .Bind(r.attempt).Bind(r.reason).Bind(r.message).Bind(r.submitted_ms).Bind(r.started_ms).Bind(r.finished_ms)
      .Bind(r.retry_at_ms).Bind(r.failures).Bind(r.failed_reason).Bind(r.failed_step).Bind(int64_t{r.killed_outside})
      .Bind(r.credential).Bind(r.step).Bind(r.total_steps).Bind(r.first_step).Bind(r.nan_steps).Bind(r.best_eval_loss);
  if (absl::Status s = write.Finish("cannot write"); !s.ok()) return s;
  if (job.ranks) {
    Statement clear(this, "DELETE FROM ranks WHERE job_id = ?");
    if (absl::Status s = clear.Bind(r.id).Finish("cannot write"); !s.ok()) return s;
    for (const RankRow& rank : r.ranks) {
      Statement insert(this, "INSERT INTO ranks VALUES (?,?,?,?,?,?,?,?,?,?)");
      insert.Bind(r.id).Bind(rank.rank).Bind(rank.node).BindBlob(rank.slot).Bind(rank.local_rank).Bind(rank.local_world_size)
          .Bind(rank.pid).Bind(int64_t{rank.ended}).Bind(int64_t{rank.gone}).Bind(rank.reason);
      if (absl::Status s = insert.Finish("cannot write"); !s.ok()) return s;
    }
  }
  for (const auto& [reason, count] : r.failures_of) {
    Statement insert(this, "INSERT OR REPLACE INTO failures VALUES (?,?,?)");
    if (absl::Status s = insert.Bind(r.id).Bind(reason).Bind(count).Finish("cannot write"); !s.ok()) return s;
  }
  if (job.checkpoints) {
    Statement clear(this, "DELETE FROM checkpoints WHERE job_id = ?");
    if (absl::Status s = clear.Bind(r.id).Finish("cannot write"); !s.ok()) return s;
    for (const v1::CheckpointInfo& info : r.checkpoints) {
      Statement insert(this, "INSERT OR REPLACE INTO checkpoints VALUES (?,?,?)");
      if (absl::Status s = insert.Bind(r.id).Bind(info.step()).BindBlob(info).Finish("cannot write"); !s.ok()) return s;
    }
  }
  return absl::OkStatus();
}

absl::Status Store::WriteAttempt(const AttemptRow& a) {
  Statement write(this, "INSERT OR REPLACE INTO attempts VALUES (?,?,?,?,?,?,?,?)");
  write.Bind(a.job_id).Bind(a.attempt).Bind(a.started_ms).Bind(a.ended_ms).Bind(a.reason).Bind(a.message).Bind(a.step).Bind(a.nodes);
  return write.Finish("cannot write");
}

absl::Status Store::Commit(const StoreBatch& batch) {
  HIERAD_FAILPOINT("store.begin");
  if (absl::Status s = Run("BEGIN IMMEDIATE"); !s.ok()) return s;
  absl::Status status = Failpoint("store.write");
  for (const StoreBatch::Job& job : batch.jobs) {
    if (status.ok()) status = WriteJob(job);
  }
  for (const AttemptRow& attempt : batch.attempts) {
    if (status.ok()) status = WriteAttempt(attempt);
  }
  if (status.ok()) status = Failpoint("store.commit");
  if (status.ok()) status = Run("COMMIT");
  if (!status.ok()) {
    sqlite3_exec(db_, "ROLLBACK", nullptr, nullptr, nullptr);
    return status;
  }
  HIERAD_FAILPOINT("store.committed");
  for (const StoreBatch::Job& job : batch.jobs) next_job_id_ = std::max(next_job_id_, job.row->id + 1);
  return absl::OkStatus();
}

absl::Status Store::LoadParts(JobRow* row) {
  Statement ranks(this, "SELECT rank, node, slot, local_rank, local_world_size, pid, ended, gone, reason FROM ranks WHERE job_id = ? ORDER BY rank");
  ranks.Bind(row->id);
  while (ranks.Next()) {
    RankRow& rank = row->ranks.emplace_back();
    rank.rank = static_cast<int>(ranks.Int());
    rank.node = ranks.Text();
    if (!ranks.Parse(&rank.slot)) return absl::DataLossError(absl::StrCat(path_, ": the slot of job ", row->id, " is not readable"));
    rank.local_rank = static_cast<int>(ranks.Int());
    rank.local_world_size = static_cast<int>(ranks.Int());
    rank.pid = static_cast<int>(ranks.Int());
    rank.ended = ranks.Int() != 0;
    rank.gone = ranks.Int() != 0;
    rank.reason = static_cast<v1::Reason>(ranks.Int());
  }
  if (absl::Status s = ranks.Finish("cannot read"); !s.ok()) return s;
  Statement failures(this, "SELECT reason, count FROM failures WHERE job_id = ?");
  failures.Bind(row->id);
  while (failures.Next()) {
    const auto reason = static_cast<v1::Reason>(failures.Int());
    row->failures_of[reason] = static_cast<int>(failures.Int());
  }
  if (absl::Status s = failures.Finish("cannot read"); !s.ok()) return s;
  Statement infos(this, "SELECT info FROM checkpoints WHERE job_id = ? ORDER BY step DESC");
  infos.Bind(row->id);
  while (infos.Next()) {
    if (!infos.Parse(&row->checkpoints.emplace_back())) {
      return absl::DataLossError(absl::StrCat(path_, ": a checkpoint record of job ", row->id, " is not readable"));
    }
  }
  return infos.Finish("cannot read");
}

absl::StatusOr<std::vector<JobRow>> Store::LoadLive() {
  std::vector<JobRow> rows;
  Statement select(this, absl::StrCat("SELECT ", kJobColumns, " FROM jobs WHERE state NOT IN (", v1::SUCCEEDED, ",", v1::FAILED, ",",
                                      v1::CANCELLED, ") ORDER BY id"));
  while (select.Next()) {
    if (!ReadJob(&select, &rows.emplace_back())) return absl::DataLossError(absl::StrCat(path_, ": job ", rows.back().id, " is not readable"));
  }
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  for (JobRow& row : rows) {
    if (row.attempt == 0) continue;   // has neither ranks nor checkpoints; most of a long queue
    if (absl::Status s = LoadParts(&row); !s.ok()) return s;
  }
  return rows;
}

absl::StatusOr<std::optional<JobRow>> Store::Load(uint64_t job_id) {
  std::optional<JobRow> row;
  Statement select(this, absl::StrCat("SELECT ", kJobColumns, " FROM jobs WHERE id = ?"));
  select.Bind(static_cast<int64_t>(job_id));
  if (select.Next() && !ReadJob(&select, &row.emplace())) return absl::DataLossError(absl::StrCat(path_, ": job ", job_id, " is not readable"));
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  if (row) {
    if (absl::Status s = LoadParts(&*row); !s.ok()) return s;
  }
  return row;
}

absl::StatusOr<std::optional<uint64_t>> Store::FindByClientKey(const std::string& key) {
  std::optional<uint64_t> id;
  Statement select(this, "SELECT id FROM jobs WHERE client_key = ?");
  select.Bind(key);
  if (select.Next()) id = select.Int();
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  return id;
}

absl::StatusOr<std::vector<JobRow>> Store::List(const ListFilter& filter) {
  std::string states;
  for (v1::JobState state : filter.states) absl::StrAppend(&states, states.empty() ? "" : ",", static_cast<int>(state));
  std::vector<JobRow> rows;
  Statement select(this, absl::StrCat("SELECT ", kJobColumns, " FROM jobs WHERE id < ?", states.empty() ? "" : absl::StrCat(" AND state IN (", states, ")"),
                                      filter.submitter.empty() ? "" : " AND submitter = ?", " ORDER BY id DESC LIMIT ?"));
  select.Bind(filter.before_id == 0 ? INT64_MAX : static_cast<int64_t>(filter.before_id));
  if (!filter.submitter.empty()) select.Bind(filter.submitter);
  select.Bind(filter.limit);
  while (select.Next()) {
    if (!ReadJob(&select, &rows.emplace_back())) return absl::DataLossError(absl::StrCat(path_, ": job ", rows.back().id, " is not readable"));
  }
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  return rows;
}

absl::StatusOr<std::vector<AttemptRow>> Store::Attempts(uint64_t job_id) {
  std::vector<AttemptRow> rows;
  Statement select(this, "SELECT attempt, started_ms, ended_ms, reason, message, step, nodes FROM attempts WHERE job_id = ? ORDER BY attempt");
  select.Bind(static_cast<int64_t>(job_id));
  while (select.Next()) {
    AttemptRow& row = rows.emplace_back();
    row.job_id = job_id;
    row.attempt = static_cast<int>(select.Int());
    row.started_ms = select.Int();
    row.ended_ms = select.Int();
    row.reason = static_cast<v1::Reason>(select.Int());
    row.message = select.Text();
    row.step = select.Int();
    row.nodes = select.Text();
  }
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  return rows;
}

absl::StatusOr<std::vector<uint64_t>> Store::JobsOfFolder(const std::string& run_folder) {
  std::vector<uint64_t> ids;
  Statement select(this, "SELECT id FROM jobs WHERE run_folder = ? ORDER BY id DESC LIMIT 10");
  select.Bind(run_folder);
  while (select.Next()) ids.push_back(select.Int());
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  return ids;
}

absl::StatusOr<std::vector<std::string>> Store::DrainedNodes() {
  std::vector<std::string> nodes;
  Statement select(this, "SELECT node FROM drained");
  while (select.Next()) nodes.push_back(select.Text());
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  return nodes;
}

absl::Status Store::SetDrained(const std::string& node, bool drained) {
  Statement change(this, drained ? "INSERT OR REPLACE INTO drained VALUES (?)" : "DELETE FROM drained WHERE node = ?");
  return change.Bind(node).Finish("cannot write");
}

absl::StatusOr<std::vector<FaultySlot>> Store::FaultySlots() {
  std::vector<FaultySlot> slots;
  Statement select(this, "SELECT node, slot, fault FROM faulty_slots");
  while (select.Next()) {
    FaultySlot& slot = slots.emplace_back();
    slot.node = select.Text();
    slot.slot = select.Text();
    slot.fault = select.Text();
  }
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  return slots;
}

absl::Status Store::AddFaultySlot(const FaultySlot& slot) {
  Statement add(this, "INSERT OR REPLACE INTO faulty_slots VALUES (?,?,?)");
  return add.Bind(slot.node).Bind(slot.slot).Bind(slot.fault).Finish("cannot write");
}

absl::Status Store::ForgetFaultySlots(const std::string& node) {
  Statement clear(this, "DELETE FROM faulty_slots WHERE node = ?");
  return clear.Bind(node).Finish("cannot write");
}

absl::Status Store::ForgetCheckpoints(uint64_t job_id) {
  Statement clear(this, "DELETE FROM checkpoints WHERE job_id = ?");
  return clear.Bind(static_cast<int64_t>(job_id)).Finish("cannot write");
}

absl::StatusOr<std::vector<std::pair<v1::JobState, int64_t>>> Store::CountByState() {
  std::vector<std::pair<v1::JobState, int64_t>> counts;
  Statement select(this, "SELECT state, count(*) FROM jobs GROUP BY state");
  while (select.Next()) {
    const auto state = static_cast<v1::JobState>(select.Int());
    counts.emplace_back(state, select.Int());
  }
  if (absl::Status s = select.Finish("cannot read"); !s.ok()) return s;
  return counts;
}

}  // namespace hierad
