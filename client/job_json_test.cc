#include "client/job_json.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "base/job_keys.h"
#include "base/job_yaml.h"

namespace hierad {
namespace {

using testing::ElementsAre;

std::vector<std::string> Keys(const Json& json) {
  std::vector<std::string> keys;
  for (const auto& item : json.items()) keys.push_back(item.key());
  return keys;
}

v1::Job FullJob() {
  v1::Job job;
  job.set_id(18446744073709551615ull);
  job.mutable_spec()->set_name("a");
  job.mutable_spec()->set_seed(9007199254740993ull);
  job.mutable_spec()->mutable_model()->add_input_size(224);
  job.set_state(v1::RUNNING);
  job.set_desired(v1::DESIRED_RUN);
  job.set_step(5);
  job.mutable_last()->set_loss(NAN);
  job.mutable_last()->set_grad_norm(-INFINITY);
  job.add_ranks()->set_phase(v1::PHASE_TRAINING);
  return job;
}

// The keys are promised: a test that fails here is a broken promise, not a test to change.
TEST(JobJson, TheKeysOfAJobAreStable) {
  const Json json = JsonOf(FullJob());
  EXPECT_THAT(Keys(json),
              ElementsAre("id", "name", "state", "desired", "attempt", "reason", "message", "submitted_ms", "started_ms",
                          "finished_ms", "step", "total_steps", "epoch", "samples_per_s", "eta_s", "last", "ranks",
                          "run_folder", "submitter", "nan_steps", "first_step", "retry_at_ms", "best_eval_loss", "note",
                          "attempts", "checkpoint_ms", "restarts", "alerts", "spec"));
  EXPECT_THAT(Keys(json["last"]), ElementsAre("step", "epoch", "loss", "grad_norm", "lr", "samples", "step_s",
                                              "data_wait_s", "forward_s", "backward_s", "communication_s", "optimizer_s", "skipped", "time_ms", "eval_loss", "loss_scale"));
  EXPECT_THAT(Keys(json["ranks"][0]),
              ElementsAre("rank", "node", "slot_id", "phase", "step", "pid", "last_seen_ms", "waiting_in", "silent_s", "totals", "data"));
  EXPECT_THAT(Keys(json["ranks"][0]["data"]), ElementsAre("wait_s", "bytes", "samples", "threads", "slowest", "slowest_s"));
  EXPECT_THAT(Keys(JsonOf(v1::AttemptView())), ElementsAre("attempt", "started_ms", "ended_ms", "reason", "message", "step"));
  EXPECT_THAT(Keys(JsonOf(v1::CheckpointInfo())),
              ElementsAre("step", "path", "bytes", "sha256", "created_ms", "eval_loss", "best", "damaged"));
  v1::Node node;
  node.add_slots();
  EXPECT_THAT(Keys(JsonOf(node)), ElementsAre("name", "connected", "last_seen_ms", "version", "drained", "slots"));
  EXPECT_THAT(Keys(JsonOf(node)["slots"][0]),
              ElementsAre("id", "kind", "model", "memory_bytes", "threads", "job_id", "attempt", "rank", "fault"));
}

TEST(JobJson, ValuesAreExactAndUnknownOnesNull) {
  const Json json = JsonOf(FullJob());
  EXPECT_EQ(json["id"], 18446744073709551615ull);
  EXPECT_EQ(json["spec"]["seed"], 9007199254740993ull);
  EXPECT_EQ(json["spec"]["model"]["input_size"], Json::array({224}));
  EXPECT_EQ(json["state"], "RUNNING");
  EXPECT_EQ(json["desired"], "RUN");
  EXPECT_EQ(json["ranks"][0]["phase"], "TRAINING");
  for (const char* key : {"reason", "started_ms", "samples_per_s", "eta_s", "best_eval_loss"}) EXPECT_TRUE(json[key].is_null()) << key;
}

// Field report: JSON cannot hold NaN; one such value hid the metrics of the run.
TEST(JobJson, NaNIsAStringAndTheJsonValid) {
  const std::string text = JsonText(JsonOf(FullJob()));
  const Json back = Json::parse(text);
  EXPECT_EQ(back["last"]["loss"], "NaN");
  EXPECT_EQ(back["last"]["grad_norm"], "-Infinity");
  EXPECT_EQ(JsonOf(INFINITY), "Infinity");
  EXPECT_EQ(text.find('\n'), text.size() - 1) << "one line";
}

TEST(JobJson, BytesThatAreNotUtf8DoNotBreakIt) {
  const std::string text = JsonText({{"line", "a\xff\x01z"}});
  EXPECT_EQ(Json::parse(text)["line"], "a\xef\xbf\xbd\x01z");
}

TEST(JobJson, EveryKeyOfAJobIsThere) {
  v1::JobSpec spec;
  spec.set_name("a");
  FillDefaults(&spec);
  const Json json = JsonOf(spec);
  for (const JobKey& key : JobKeys()) {
    if (!IsSet(spec, key)) continue;
    const Json& section = key.section ? json[key.section->name()] : json;
    EXPECT_TRUE(section.contains(key.field->name())) << key.path;
    EXPECT_FALSE(section[key.field->name()].is_null()) << key.path;
  }
}

TEST(JobJson, NamesOfANewerHieradAreNumbers) {
  EXPECT_EQ(StateName(v1::JobState(99)), "99");
  EXPECT_EQ(StateName(v1::SUCCEEDED), "SUCCEEDED");
  EXPECT_EQ(ReasonName(v1::REASON_CUDA_OOM), "CUDA_OOM");
  EXPECT_EQ(SlotKindName(v1::Slot::CUDA), "CUDA");
}

}  // namespace
}  // namespace hierad
