-- hierad's store. One section a version, applied in order to whatever a state folder holds; a section that was ever
-- released is never changed.
-- version 1
CREATE TABLE jobs (
  id INTEGER PRIMARY KEY AUTOINCREMENT,   -- never reused
  client_key TEXT NOT NULL UNIQUE,
  submitter TEXT NOT NULL,
  spec BLOB NOT NULL,                     -- hierad.v1.JobSpec, defaults filled in
  run_folder TEXT NOT NULL,
  state INTEGER NOT NULL,                 -- hierad.v1.JobState
  desired INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  reason INTEGER NOT NULL,
  message TEXT NOT NULL,
  submitted_ms INTEGER NOT NULL,
  started_ms INTEGER NOT NULL,
  finished_ms INTEGER NOT NULL,
  retry_at_ms INTEGER NOT NULL,
  failures INTEGER NOT NULL,
  failed_reason INTEGER NOT NULL,
  failed_step INTEGER NOT NULL,
  killed_outside INTEGER NOT NULL,
  credential TEXT NOT NULL,
  step INTEGER NOT NULL,
  total_steps INTEGER NOT NULL,
  first_step INTEGER NOT NULL,
  nan_steps INTEGER NOT NULL,
  best_eval_loss REAL                     -- NULL: no evaluation yet
);
CREATE INDEX jobs_by_state ON jobs (state);
-- Ranks of the current, or last, attempt.
CREATE TABLE ranks (
  job_id INTEGER NOT NULL REFERENCES jobs (id),
  rank INTEGER NOT NULL,
  node TEXT NOT NULL,
  slot BLOB NOT NULL,                     -- hierad.v1.Slot
  local_rank INTEGER NOT NULL,
  local_world_size INTEGER NOT NULL,
  pid INTEGER NOT NULL,
  ended INTEGER NOT NULL,
  gone INTEGER NOT NULL,
  reason INTEGER NOT NULL,
  PRIMARY KEY (job_id, rank)
) WITHOUT ROWID;
-- Attempts that are over: the history behind a job's last message.
CREATE TABLE attempts (
  job_id INTEGER NOT NULL REFERENCES jobs (id),
  attempt INTEGER NOT NULL,
  started_ms INTEGER NOT NULL,
  ended_ms INTEGER NOT NULL,
  reason INTEGER NOT NULL,
  message TEXT NOT NULL,
  step INTEGER NOT NULL,
  PRIMARY KEY (job_id, attempt)
) WITHOUT ROWID;
CREATE TABLE checkpoints (
  job_id INTEGER NOT NULL REFERENCES jobs (id),
  step INTEGER NOT NULL,
  info BLOB NOT NULL,                     -- hierad.v1.CheckpointInfo
  PRIMARY KEY (job_id, step)
) WITHOUT ROWID;
-- Starts of hierad on this folder: orders of a later start always have higher sequence numbers.
CREATE TABLE starts (
  epoch INTEGER PRIMARY KEY AUTOINCREMENT,
  started_ms INTEGER NOT NULL
);
-- version 2
-- Attempts of a job that failed, by class.
CREATE TABLE failures (
  job_id INTEGER NOT NULL REFERENCES jobs (id),
  reason INTEGER NOT NULL,                -- hierad.v1.Reason
  count INTEGER NOT NULL,
  PRIMARY KEY (job_id, reason)
) WITHOUT ROWID;
-- Nodes that get no more work.
CREATE TABLE drained (node TEXT PRIMARY KEY) WITHOUT ROWID;
-- version 3
-- Of the ranks of an attempt, in their order, with a space between.
ALTER TABLE attempts ADD COLUMN nodes TEXT NOT NULL DEFAULT '';
-- version 4
-- Slots that get no more work: their cards had a fault.
CREATE TABLE faulty_slots (
  node TEXT NOT NULL,
  slot TEXT NOT NULL,
  fault TEXT NOT NULL,                    -- what it was, for people
  PRIMARY KEY (node, slot)
) WITHOUT ROWID;
