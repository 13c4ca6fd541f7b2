#include "server/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>

#include "absl/strings/str_cat.h"
#include "server/schema.h"

namespace hierad {
namespace {

class StoreTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string path = testing::TempDir() + "/hierad_store_XXXXXX";
    folder_ = mkdtemp(path.data());
    path_ = folder_ + "/hierad.db";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::unique_ptr<Store> Open() {
    auto store = Store::Open(path_, 200);
    EXPECT_TRUE(store.ok()) << store.status();
    return *std::move(store);
  }
  static JobRow Row(uint64_t id) {
    JobRow row;
    row.id = id;
    row.client_key = absl::StrCat("key-", id);
    row.submitter = "me";
    row.spec.set_name(absl::StrCat("job-", id));
    row.run_folder = absl::StrCat("/runs/", id);
    row.submitted_ms = 1000 + id;
    return row;
  }
  static absl::Status Put(Store* store, const JobRow& row) {
    StoreBatch batch;
    batch.jobs.push_back({&row});
    return store->Commit(batch);
  }
  std::string folder_, path_;
};

TEST_F(StoreTest, EverythingOfARowComesBack) {
  JobRow row = Row(3);
  row.state = v1::RUNNING;
  row.desired = v1::DESIRED_CANCEL;
  row.attempt = 2;
  row.reason = v1::REASON_HOST_OOM;
  row.message = "it's \"full\" \n\\";
  row.started_ms = 5;
  row.finished_ms = 6;
  row.retry_at_ms = 7;
  row.failures = 1;
  row.failed_reason = v1::REASON_CRASHED;
  row.failed_step = 99;
  row.killed_outside = true;
  row.credential = "abc";
  row.step = 10;
  row.total_steps = 100;
  row.first_step = 4;
  row.nan_steps = 2;
  row.best_eval_loss = 0.1;
  row.spec.mutable_schedule()->set_steps(100);
  RankRow& rank = row.ranks.emplace_back();
  rank.node = "n1";
  rank.slot.set_id("gpu-1");
  rank.slot.set_kind(v1::Slot::CUDA);
  rank.local_rank = 0;
  rank.local_world_size = 2;
  rank.pid = 77;
  rank.ended = true;
  rank.reason = v1::REASON_COMPLETED;
  for (int step : {20, 10}) {
    v1::CheckpointInfo& info = row.checkpoints.emplace_back();
    info.set_step(step);
    info.set_path("/runs/3/checkpoints/" + std::to_string(step));
  }
  ASSERT_TRUE(Put(Open().get(), row).ok());

  auto store = Open();
  auto live = store->LoadLive();
  ASSERT_TRUE(live.ok());
  ASSERT_EQ(live->size(), 1u);
  const JobRow& back = live->front();
  EXPECT_EQ(back.client_key, row.client_key);
  EXPECT_EQ(back.submitter, "me");
  EXPECT_EQ(back.spec.SerializeAsString(), row.spec.SerializeAsString());
  EXPECT_EQ(back.run_folder, row.run_folder);
  EXPECT_EQ(back.state, v1::RUNNING);
  EXPECT_EQ(back.desired, v1::DESIRED_CANCEL);
  EXPECT_EQ(back.attempt, 2);
  EXPECT_EQ(back.reason, v1::REASON_HOST_OOM);
  EXPECT_EQ(back.message, row.message);
  EXPECT_EQ(back.submitted_ms, row.submitted_ms);
  EXPECT_EQ(back.started_ms, 5);
  EXPECT_EQ(back.finished_ms, 6);
  EXPECT_EQ(back.retry_at_ms, 7);
  EXPECT_EQ(back.failures, 1);
  EXPECT_EQ(back.failed_reason, v1::REASON_CRASHED);
  EXPECT_EQ(back.failed_step, 99);
  EXPECT_TRUE(back.killed_outside);
  EXPECT_EQ(back.credential, "abc");
  EXPECT_EQ(back.step, 10);
  EXPECT_EQ(back.total_steps, 100);
  EXPECT_EQ(back.first_step, 4);
  EXPECT_EQ(back.nan_steps, 2);
  EXPECT_EQ(back.best_eval_loss, 0.1);
  ASSERT_EQ(back.ranks.size(), 1u);
  EXPECT_EQ(back.ranks[0].node, "n1");
  EXPECT_EQ(back.ranks[0].slot.id(), "gpu-1");
  EXPECT_EQ(back.ranks[0].local_world_size, 2);
  EXPECT_EQ(back.ranks[0].pid, 77);
  EXPECT_TRUE(back.ranks[0].ended);
  EXPECT_FALSE(back.ranks[0].gone);
  EXPECT_EQ(back.ranks[0].reason, v1::REASON_COMPLETED);
  ASSERT_EQ(back.checkpoints.size(), 2u);
  EXPECT_EQ(back.checkpoints[0].step(), 20);   // newest first
  EXPECT_EQ(store->next_job_id(), 4u);
}

TEST_F(StoreTest, ABatchIsAllOrNothing) {
  auto store = Open();
  ASSERT_TRUE(Put(store.get(), Row(1)).ok());
  JobRow good = Row(2), bad = Row(3);
  bad.client_key = "key-1";   // taken
  StoreBatch batch;
  batch.jobs = {{&good}, {&bad}};
  EXPECT_FALSE(store->Commit(batch).ok());
  EXPECT_FALSE(store->Load(2)->has_value());
  ASSERT_TRUE(Put(store.get(), good).ok());   // and the store goes on
}

TEST_F(StoreTest, ListFiltersAndPages) {
  auto store = Open();
  for (int id = 1; id <= 10; ++id) {
    JobRow row = Row(id);
    row.state = id % 2 ? v1::SUCCEEDED : v1::QUEUED;
    ASSERT_TRUE(Put(store.get(), row).ok());
  }
  const auto ids = [&](const ListFilter& filter) {
    std::vector<uint64_t> out;
    const auto rows = store->List(filter);
    if (!rows.ok()) return out;
    for (const JobRow& row : *rows) out.push_back(row.id);
    return out;
  };
  EXPECT_THAT(ids({{}, "", 0, 3}), testing::ElementsAre(10, 9, 8));
  EXPECT_THAT(ids({{}, "", 8, 2}), testing::ElementsAre(7, 6));
  EXPECT_THAT(ids({{v1::QUEUED}, "", 0, 100}), testing::ElementsAre(10, 8, 6, 4, 2));
  EXPECT_EQ(store->LoadLive()->size(), 5u);
  EXPECT_EQ(*store->FindByClientKey("key-7"), 7u);
  EXPECT_EQ(*store->FindByClientKey("nothing"), std::nullopt);
  EXPECT_THAT(*store->CountByState(), testing::UnorderedElementsAre(testing::Pair(v1::QUEUED, 5), testing::Pair(v1::SUCCEEDED, 5)));
}

TEST_F(StoreTest, AttemptsAreKept) {
  auto store = Open();
  const JobRow row = Row(1);
  StoreBatch batch;
  batch.jobs.push_back({&row});
  batch.attempts.push_back({1, 1, 10, 20, v1::REASON_CRASHED, "boom", 5, "a b"});
  ASSERT_TRUE(store->Commit(batch).ok());
  auto attempts = store->Attempts(1);
  ASSERT_EQ(attempts->size(), 1u);
  EXPECT_EQ(attempts->front().message, "boom");
  EXPECT_EQ(attempts->front().step, 5);
  EXPECT_EQ(attempts->front().nodes, "a b");
}

TEST_F(StoreTest, EpochsGrowAcrossStarts) {
  const uint64_t first = *Open()->BeginEpoch(1);
  EXPECT_GT(*Open()->BeginEpoch(1), first);
}

// A child says each job's id once its commit is acknowledged, and is killed at some point: what was said is there.
TEST_F(StoreTest, AcknowledgedCommitsSurviveAKill) {
  for (int round = 0; round < 5; ++round) {
    int pipe_fds[2];
    ASSERT_EQ(pipe(pipe_fds), 0);
    const uint64_t first = Open()->next_job_id();
    const pid_t child = fork();
    if (child == 0) {
      auto store = Store::Open(path_, 5000);
      if (!store.ok()) _exit(1);
      for (uint64_t id = first;; ++id) {
        if (!Put(store->get(), Row(id)).ok()) _exit(1);
        if (write(pipe_fds[1], &id, sizeof(id)) != sizeof(id)) _exit(1);
      }
    }
    close(pipe_fds[1]);
    uint64_t acknowledged = 0, id = 0;
    for (int i = 0; i < 10 + round * 7 && read(pipe_fds[0], &id, sizeof(id)) == sizeof(id); ++i) acknowledged = id;
    kill(child, SIGKILL);
    while (read(pipe_fds[0], &id, sizeof(id)) == sizeof(id)) acknowledged = id;
    close(pipe_fds[0]);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status));
    auto store = Open();
    for (uint64_t at = 1; at <= acknowledged; ++at) ASSERT_TRUE(store->Load(at)->has_value()) << at;
    EXPECT_GT(store->next_job_id(), acknowledged);
  }
}

TEST_F(StoreTest, MigratesForwardAndKeepsWhatIsThere) {
  ASSERT_TRUE(Put(Open().get(), Row(1)).ok());
  const std::string newer = absl::StrCat(kSchemaSql, "\n-- version 1000\nALTER TABLE jobs ADD COLUMN note TEXT NOT NULL DEFAULT 'old';\n");
  {
    auto store = Store::OpenWithSchema(path_, newer, 200);
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_TRUE((*store)->Load(1)->has_value());
    ASSERT_TRUE(Put(store->get(), Row(2)).ok());
  }
  ASSERT_TRUE(Store::OpenWithSchema(path_, newer, 200).ok());   // again: nothing to do
  const auto older = Store::Open(path_, 200);
  ASSERT_FALSE(older.ok());
  EXPECT_THAT(std::string(older.status().message()), testing::AllOf(testing::HasSubstr("1000"), testing::HasSubstr("newer hierad")));
}

TEST_F(StoreTest, AFailedMigrationChangesNothing) {
  ASSERT_TRUE(Put(Open().get(), Row(1)).ok());
  const std::string broken = absl::StrCat(kSchemaSql, "\n-- version 1000\nCREATE TABLE extra (a); THIS IS NOT SQL;\n");
  EXPECT_FALSE(Store::OpenWithSchema(path_, broken, 200).ok());
  auto store = Open();
  EXPECT_TRUE(store->Load(1)->has_value());
  const std::string good = absl::StrCat(kSchemaSql, "\n-- version 1000\nCREATE TABLE extra (a);\n");   // not there from the broken one
  EXPECT_TRUE(Store::OpenWithSchema(path_, good, 200).ok());
}

TEST_F(StoreTest, RefusesWhatIsNotItsOwn) {
  FILE* file = fopen(path_.c_str(), "w");
  fputs("this is a text file, and long enough to be looked at as a database header by SQLite ........................", file);
  fclose(file);
  EXPECT_EQ(Store::Open(path_, 200).status().code(), absl::StatusCode::kDataLoss);
  std::filesystem::remove(path_);
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path_.c_str(), &db), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(db, "CREATE TABLE other (a)", nullptr, nullptr, nullptr), SQLITE_OK);
  sqlite3_close(db);
  EXPECT_THAT(std::string(Store::Open(path_, 200).status().message()), testing::HasSubstr("not hierad's"));
}

TEST_F(StoreTest, AnotherProgramsLockIsWaitedOutThenSaid) {
  auto store = Open();
  sqlite3* other = nullptr;
  ASSERT_EQ(sqlite3_open(path_.c_str(), &other), SQLITE_OK);
  ASSERT_EQ(sqlite3_exec(other, "BEGIN EXCLUSIVE", nullptr, nullptr, nullptr), SQLITE_OK);
  const absl::Status locked = Put(store.get(), Row(1));
  EXPECT_EQ(locked.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(locked.message()), testing::HasSubstr("another program holds a lock"));
  sqlite3_close(other);
  EXPECT_TRUE(Put(store.get(), Row(1)).ok());
}

TEST_F(StoreTest, CredentialsAreNotReadableByOthers) {
  Open();
  EXPECT_EQ(std::filesystem::status(path_).permissions() & std::filesystem::perms(077), std::filesystem::perms::none);
}

}  // namespace
}  // namespace hierad
