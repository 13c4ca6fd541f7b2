#include "client/doctor_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/job_yaml.h"
#include "base/text.h"
#include "client/doctor_figures.h"

namespace hierad {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int64_t kGib = int64_t{1} << 30, kMib = 1 << 20;

// A machine with nothing to complain of: two H200.
DoctorFigures Good() {
  DoctorFigures f;
  f.shm_bytes = 8 * kGib;
  f.shm_free_bytes = 8 * kGib;
  f.memlock_bytes = DoctorFigures::kUnlimited;
  f.open_files = 65536;
  f.memory_bytes = 256 * kGib;
  f.memory_free_bytes = 200 * kGib;
  f.disk_folder = "/data";
  f.disk_free_bytes = 500 * kGib;
  f.disk_bytes_per_s = 1e9;
  f.gpus.library = true;
  f.gpus.driver = "580.82";
  f.gpus.cuda = 13000;
  for (unsigned i = 0; i < 2; ++i) {
    GpuCard card;
    card.index = i;
    card.uuid = i == 0 ? "GPU-aaaa-0" : "GPU-bbbb-1";
    card.name = "NVIDIA H200";
    card.memory_bytes = 140 * kGib;
    card.free_bytes = 139 * kGib;
    card.sm_mhz = 345;
    card.most_sm_mhz = 1980;
    card.slowed = 1;
    card.ecc = true;
    card.uncorrected_errors = 0;
    f.gpus.cards.push_back(card);
  }
  f.cuda_runtime = 13000;
  f.nccl = 22809;
  f.samples = 12800;
  f.data_samples_per_s = 20000;
  f.data_threads = 8;
  f.step_ms = 30;
  return f;
}

v1::JobSpec Job(const std::string& more = "") {
  auto spec = ParseJobYaml("name: a\nmodel: {in_chans: 8}\ndata: {source: npy, path: /x.npy}\nschedule: {epochs: 1}\n"
                           "step: {batch_per_rank: 128, precision: bf16}\nresources: {device: cuda}\n",
                           {.overrides = more.empty() ? std::vector<std::string>{} : Split(more, ';')});
  EXPECT_TRUE(spec.ok()) << spec.status();
  FillDefaults(&*spec);
  return *spec;
}

DoctorCheck Find(const DoctorFigures& figures, const v1::JobSpec* job, const std::string& name) {
  for (const DoctorCheck& check : Examine(figures, job)) {
    if (check.name == name) return check;
  }
  ADD_FAILURE() << "no check " << name;
  return {};
}

void Expect(const DoctorFigures& figures, const v1::JobSpec* job, const std::string& name, Verdict verdict, const std::string& seen) {
  const DoctorCheck check = Find(figures, job, name);
  EXPECT_STREQ(VerdictName(check.verdict), VerdictName(verdict)) << name << ": " << check.seen;
  EXPECT_THAT(check.seen, HasSubstr(seen)) << name;
  EXPECT_EQ(check.advice.empty(), verdict == Verdict::kPass) << name;
}

TEST(DoctorTest, AGoodMachinePassesEverything) {
  const v1::JobSpec job = Job();
  const auto checks = Examine(Good(), &job);
  for (const DoctorCheck& check : checks) {
    EXPECT_EQ(check.verdict, Verdict::kPass) << check.name << ": " << check.seen;
    EXPECT_FALSE(check.seen.empty()) << check.name;
  }
  std::vector<std::string> names;
  for (const DoctorCheck& check : checks) names.push_back(check.name);
  EXPECT_THAT(names, testing::UnorderedElementsAre("static shapes", "last batch", "capture", "allocator", "memory headroom", "data rate", "GPU",
                                                   "visible devices", "driver", "NCCL", "clocks", "ECC", "/dev/shm", "memlock", "open files",
                                                   "disk space", "disk speed"));
  for (const DoctorCheck& check : Examine(Good(), nullptr)) EXPECT_EQ(check.verdict, Verdict::kPass) << check.name << ": " << check.seen;
}

TEST(DoctorTest, AMachineWithoutAGpuSaysNone) {
  DoctorFigures f = Good();
  f.gpus = GpuCards();
  f.memlock_bytes = 64 << 10;   // harmless here
  Expect(f, nullptr, "GPU", Verdict::kPass, "none");
  Expect(f, nullptr, "memlock", Verdict::kPass, "64.0 KiB");
  const v1::JobSpec cuda = Job(), cpu = Job("resources.device=cpu;step.batch_per_rank=2");
  Expect(f, &cuda, "GPU", Verdict::kFail, "none");
  Expect(f, &cpu, "GPU", Verdict::kPass, "none");
  Expect(f, &cpu, "capture", Verdict::kPass, "on a CPU");
}

// A container's 64 MiB, four ranks.
TEST(DoctorTest, SharedMemoryOfAContainer) {
  DoctorFigures f = Good();
  f.shm_bytes = f.shm_free_bytes = 64 * kMib;
  f.gpus.cards.resize(4, f.gpus.cards[0]);
  const v1::JobSpec four = Job("resources.ranks=4"), one = Job(), cpu = Job("resources.device=cpu;resources.ranks=4");
  Expect(f, &four, "/dev/shm", Verdict::kFail, "64.0 MiB, 64.0 MiB free; NCCL may take 256.0 MiB for 4 ranks");
  EXPECT_THAT(Find(f, &four, "/dev/shm").advice, HasSubstr("--shm-size"));
  Expect(f, &one, "/dev/shm", Verdict::kWarn, "64.0 MiB");
  Expect(f, nullptr, "/dev/shm", Verdict::kWarn, "64.0 MiB");
  Expect(f, &cpu, "/dev/shm", Verdict::kPass, "do not use it");
  f.shm_bytes.reset();
  Expect(f, &four, "/dev/shm", Verdict::kWarn, "not there");
}

TEST(DoctorTest, LockedMemoryAndOpenFiles) {
  DoctorFigures f = Good();
  f.memlock_bytes = 64 << 10;
  const v1::JobSpec here = Job("resources.ranks=2"), further = Job("resources.ranks=8");
  Expect(f, &here, "memlock", Verdict::kWarn, "64.0 KiB");
  Expect(f, &further, "memlock", Verdict::kFail, "64.0 KiB; NCCL over RDMA between nodes");
  EXPECT_THAT(Find(f, &further, "memlock").advice, HasSubstr("LimitMEMLOCK=infinity"));
  Expect(f, &further, "GPU", Verdict::kWarn, "fewer than the job's 8 ranks");
  f.open_files = 512;
  Expect(f, nullptr, "open files", Verdict::kWarn, "512");
  f.open_files = 64;
  Expect(f, nullptr, "open files", Verdict::kFail, "64");
}

TEST(DoctorTest, VisibleDevices) {
  const v1::JobSpec job = Job();
  DoctorFigures f = Good();
  for (const char* twice : {"0,0", "GPU-aaaa-0,GPU-aaaa-0", "0,GPU-aaaa-0", "1,GPU-bbbb,0"}) {
    f.cuda_visible_devices = twice;
    Expect(f, &job, "visible devices", Verdict::kFail, "are the same card");
    Expect(f, nullptr, "visible devices", Verdict::kFail, "are the same card");
  }
  f.cuda_visible_devices = "";
  Expect(f, &job, "visible devices", Verdict::kFail, "empty");
  Expect(f, nullptr, "visible devices", Verdict::kWarn, "empty");
  f.cuda_visible_devices = "0,7";
  Expect(f, &job, "visible devices", Verdict::kFail, "no card is called 7");
  f.cuda_visible_devices = "1,0";
  Expect(f, &job, "visible devices", Verdict::kPass, "CUDA_VISIBLE_DEVICES=1,0");
  f.gpus.cards.clear();   // doubled all the same
  f.cuda_visible_devices = "0,0";
  Expect(f, nullptr, "visible devices", Verdict::kFail, "are the same card");
}

TEST(DoctorTest, DriverNcclAndCards) {
  const v1::JobSpec two = Job("resources.ranks=2"), one = Job();
  DoctorFigures f = Good();
  f.gpus.cuda = 12020;
  Expect(f, &one, "driver", Verdict::kFail, "runs CUDA up to 12.2; this build brings 13.0");
  f.gpus.cuda = 13010;
  Expect(f, &one, "driver", Verdict::kPass, "13.1");
  f.cuda_runtime = 0;
  Expect(f, &one, "driver", Verdict::kFail, "brings none");
  f.nccl = 0;
  Expect(f, &two, "NCCL", Verdict::kFail, "none");
  Expect(f, &one, "NCCL", Verdict::kPass, "none");
  Expect(Good(), &two, "NCCL", Verdict::kPass, "2.28.9");
  f = Good();
  f.gpus.silent = {3};
  Expect(f, nullptr, "GPU", Verdict::kFail, "1 of 3 cards do not answer");
  f = Good();
  f.gpus.cards.clear();
  f.gpus.problem = "libnvidia-ml.so.1 is there but does not start (error 9)";
  Expect(f, nullptr, "GPU", Verdict::kWarn, "error 9");
  Expect(f, &one, "GPU", Verdict::kFail, "error 9");
}

TEST(DoctorTest, ClocksAndEcc) {
  DoctorFigures f = Good();
  Expect(f, nullptr, "clocks", Verdict::kPass, "345 MHz of 1980");
  f.gpus.cards[1].slowed = 0x40;
  Expect(f, nullptr, "clocks", Verdict::kWarn, "held down: card 1 by heat");
  f.gpus.cards[0].ecc = false;
  Expect(f, nullptr, "ECC", Verdict::kWarn, "off on card 0");
  f.gpus.cards[1].uncorrected_errors = 2;
  Expect(f, nullptr, "ECC", Verdict::kFail, "card 1: 2 uncorrected errors");
  for (GpuCard& card : f.gpus.cards) card.ecc.reset(), card.uncorrected_errors.reset(), card.sm_mhz.reset(), card.slowed.reset();
  Expect(f, nullptr, "ECC", Verdict::kPass, "not told");
  Expect(f, nullptr, "clocks", Verdict::kPass, "not told");
}

TEST(DoctorTest, MemoryHeadroom) {
  const v1::JobSpec job = Job("step.mode=fused");
  DoctorFigures f = Good();
  Expect(f, &job, "memory headroom", Verdict::kPass, " GiB a rank; card 0 has 140.0 GiB, 139.0 GiB free");
  f.gpus.cards[1].free_bytes = 2 * kGib;
  Expect(f, &job, "memory headroom", Verdict::kWarn, "card 1 has 140.0 GiB, 2.0 GiB free");
  EXPECT_THAT(Find(f, &job, "memory headroom").advice, HasSubstr("another process"));
  f.gpus.cards[1].memory_bytes = 8 * kGib;
  Expect(f, &job, "memory headroom", Verdict::kFail, "card 1 has 8.0 GiB");
  EXPECT_THAT(Find(f, &job, "memory headroom").advice, HasSubstr("batch_per_rank"));
  // An estimate from above does not refuse what may fit.
  const v1::JobSpec eager = Job("step.mode=eager");
  f = Good();
  for (GpuCard& card : f.gpus.cards) card.memory_bytes = card.free_bytes = 12 * kGib;
  Expect(f, &eager, "memory headroom", Verdict::kWarn, "at most ");
  const v1::JobSpec cpu = Job("resources.device=cpu;resources.ranks=4");
  f.memory_bytes = f.memory_free_bytes = 16 * kGib;
  Expect(f, &cpu, "memory headroom", Verdict::kFail, "for 4 ranks; the host has 16.0 GiB");
}

TEST(DoctorTest, DataAgainstTheStep) {
  const v1::JobSpec job = Job();
  DoctorFigures f = Good();   // 128 samples in 30 ms: 4,267 a second
  f.data_samples_per_s = 5200;
  Expect(f, &job, "data rate", Verdict::kPass, "5,200 samples/s read by 8 threads; a rank's step of 30 ms takes 4,266/s");
  f.data_samples_per_s = 4500;
  Expect(f, &job, "data rate", Verdict::kWarn, "hardly any margin");
  f.data_samples_per_s = 1067;
  Expect(f, &job, "data rate", Verdict::kWarn, "wait 75% of its time");
  EXPECT_THAT(Find(f, &job, "data rate").advice, HasSubstr("data.workers"));
  f.step_ms.reset();
  f.step_skipped = "too long";
  Expect(f, &job, "data rate", Verdict::kPass, "not timed: too long");
  f.step_problem = "CUDA out of memory";
  Expect(f, &job, "data rate", Verdict::kFail, "CUDA out of memory");
  f.data_problem = "/x.npy is not there";
  Expect(f, &job, "data rate", Verdict::kFail, "/x.npy is not there");
}

TEST(DoctorTest, LastBatchAllocatorCapture) {
  DoctorFigures f = Good();
  f.samples = 1000;
  const v1::JobSpec pad = Job(), drop = Job("data.last_batch=drop"), all = Job("data.last_batch=drop;step.batch_per_rank=1024");
  Expect(f, &pad, "last batch", Verdict::kPass, "the last has 104");
  Expect(f, &drop, "last batch", Verdict::kWarn, "drop leaves out 104");
  Expect(f, &all, "last batch", Verdict::kFail, "no step at all");
  f.samples.reset();
  Expect(f, &drop, "last batch", Verdict::kPass, "not known");
  const v1::JobSpec eager = Job("step.mode=eager"), cudnn = Job("step.mode=graph_safe;step.sdpa_backend=cudnn");
  Expect(f, &eager, "allocator", Verdict::kWarn, "fragment");
  f.torch_allocator = "expandable_segments:True";
  Expect(f, &eager, "allocator", Verdict::kPass, "expandable");
  Expect(f, &eager, "capture", Verdict::kPass, "captures nothing");
  Expect(f, &cudnn, "capture", Verdict::kWarn, "cudnn");
}

TEST(DoctorTest, RoomAndSpeedForCheckpoints) {
  const v1::JobSpec job = Job();   // Base: a checkpoint is 0.9 GB, four of them and the weights
  DoctorFigures f = Good();
  f.disk_free_bytes = 3 * kGib;
  Expect(f, &job, "disk space", Verdict::kWarn, "4 checkpoints of ");
  f.disk_free_bytes = 1 * kGib;
  Expect(f, &job, "disk space", Verdict::kFail, "1.0 GiB free at /data");
  f.disk_bytes_per_s = 20e6;   // 45 s, every 30
  Expect(f, &job, "disk speed", Verdict::kWarn, "one is made every 30 s");
  Expect(f, nullptr, "disk speed", Verdict::kWarn, "20 MB/s");
  f.disk_bytes_per_s.reset();
  f.disk_problem = "cannot write in \"/data\": Permission denied";
  Expect(f, &job, "disk speed", Verdict::kFail, "Permission denied");
}

TEST(DoctorTest, WithoutAWorkerItSaysSo) {
  DoctorFigures f = Good();
  f.gpus = GpuCards();
  f.worker_problem = "hiera-worker is neither at /x nor in PATH";
  Expect(f, nullptr, "engine", Verdict::kFail, "neither at");
}

TEST(DoctorTest, FiguresOfTheWorker) {
  DoctorFigures f;
  ASSERT_TRUE(ParseWorkerFigures(R"({"gpus": {"library": true, "problem": "", "driver": "580", "cuda": 13000, "silent": [2], "cards": [
      {"index": 0, "uuid": "GPU-a", "name": "X", "memory_bytes": 10, "free_bytes": 9, "sm_mhz": 5, "most_sm_mhz": null, "temperature_c": 40,
       "slowed": 32, "ecc": true, "uncorrected_errors": null}]}, "cuda_runtime": 13000, "nccl": 22809,
      "data": {"samples": 7, "samples_per_s": 1.5, "threads": 2}, "step": {"skipped": "why"}})", &f).ok());
  EXPECT_EQ(f.gpus.cards[0].slowed, 32u);
  EXPECT_EQ(f.gpus.cards[0].ecc, true);
  EXPECT_FALSE(f.gpus.cards[0].most_sm_mhz.has_value());
  EXPECT_EQ(f.samples, 7);
  EXPECT_EQ(f.step_skipped, "why");
  EXPECT_FALSE(f.step_ms.has_value());
  for (const char* wrong : {"", "[]", "{}", "{\"gpus\": 3}", "Killed"}) {
    EXPECT_THAT(std::string(ParseWorkerFigures(wrong, &f).message()), HasSubstr("does not understand")) << wrong;
  }
}

TEST(DoctorTest, ThisMachineIsRead) {
  DoctorFigures f;
  ReadMachine("/nonexistent/run/7", &f);
  EXPECT_GT(f.memory_bytes.value_or(0), 0);
  EXPECT_GT(f.open_files.value_or(0), 0);
  EXPECT_TRUE(f.memlock_bytes.has_value());
  EXPECT_EQ(f.disk_folder, "/");   // the nearest that is there
  EXPECT_TRUE(f.disk_free_bytes.has_value());
}

}  // namespace
}  // namespace hierad
