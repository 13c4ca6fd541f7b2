// The JSON of `-o json`. Keys are stable: added to, never renamed. Integers stay integers; what is not known yet is null;
// NaN and the infinities, which JSON cannot hold, are the strings "NaN", "Infinity", "-Infinity". Times are Unix
// milliseconds.
//   job         id name state desired attempt reason message submitted_ms started_ms finished_ms step total_steps epoch
//               samples_per_s eta_s last ranks run_folder submitter nan_steps first_step retry_at_ms best_eval_loss
//               note attempts checkpoint_ms restarts (by reason) alerts spec
//   last        step epoch loss grad_norm lr samples step_s data_wait_s forward_s backward_s communication_s optimizer_s skipped time_ms eval_loss loss_scale   (a metric)
//   ranks[]     rank node slot_id phase step pid last_seen_ms waiting_in silent_s totals data (both: sums of this attempt)
//   attempts[]  attempt started_ms ended_ms reason message step   (those that are over; of describe)
//   spec        the job's keys, in sections, as in job.yaml
//   checkpoint  step path bytes sha256 created_ms eval_loss best damaged
//   node        name connected last_seen_ms version drained slots[]: id kind model memory_bytes threads job_id attempt rank
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "hierad/v1/control.pb.h"

namespace hierad {

using Json = nlohmann::ordered_json;

Json JsonOf(double value);
Json JsonOf(const v1::JobSpec& spec);
Json JsonOf(const v1::StepMetrics& metrics);
Json JsonOf(const v1::AttemptView& attempt);
Json JsonOf(const v1::Job& job);
Json JsonOf(const v1::CheckpointInfo& checkpoint);
Json JsonOf(const v1::Node& node);

// One line of valid UTF-8, whatever the strings hold.
std::string JsonText(const Json& json);

// "RUNNING", "CANCEL", "TRAINING"; a value of a newer hierad: its number.
std::string StateName(v1::JobState state);
std::string DesiredName(v1::DesiredState desired);
std::string ReasonName(v1::Reason reason);
std::string PhaseName(v1::Phase phase);
std::string SlotKindName(v1::Slot::Kind kind);

bool IsEnd(v1::JobState state);   // SUCCEEDED, FAILED, CANCELLED

}  // namespace hierad
