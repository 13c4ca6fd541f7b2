#include "base/job_yaml.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>

#include "base/fs.h"
#include "base/job_keys.h"
#include "base/job_validate.h"
#include "base/random.h"
#include "base/status.h"

namespace hierad {
namespace {

using google::protobuf::util::MessageDifferencer;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

constexpr char kSmall[] = "name: a\ndata:\n  source: synthetic\nschedule:\n  epochs: 1\n";

std::vector<std::string> Problems(const std::string& text, std::vector<std::string> overrides = {}) {
  JobYamlOptions options;
  options.base_folder = "/jobs";
  options.overrides = std::move(overrides);
  const auto spec = ParseJobYaml(text, options);
  if (spec.ok()) return {};
  EXPECT_EQ(ReasonOf(spec.status()), v1::REASON_USER_ERROR);
  return Split(std::string(spec.status().message()), '\n');
}

v1::JobSpec Parsed(const std::string& text, std::vector<std::string> overrides = {}) {
  JobYamlOptions options;
  options.base_folder = "/jobs";
  options.override_folder = "/here";
  options.overrides = std::move(overrides);
  auto spec = ParseJobYaml(text, options);
  EXPECT_TRUE(spec.ok()) << spec.status();
  return spec.ok() ? *spec : v1::JobSpec();
}

// A job whose section `section` has `line`; the line is number 7.
std::string With(const std::string& section, const std::string& line) {
  return std::string(kSmall) + section + ":\n  " + line + "\n";
}

TEST(JobYaml, ReadsEveryType) {
  const v1::JobSpec spec = Parsed(
      "name: \"eeg.run-1\"\nseed: 18446744073709551615\nmodel:\n  input_size: [224]\n  mask_unit_attn: [true, false]\n"
      "  norm_target: false\ndata: {source: ts, path: sub/../x.ts, crop_scale: [1e-1, 1]}\noptimizer:\n  lr: 1e-4\n"
      "schedule:\n  steps: 1000000000\n");
  EXPECT_EQ(spec.name(), "eeg.run-1");
  EXPECT_EQ(spec.seed(), 18446744073709551615ull);
  EXPECT_THAT(spec.model().input_size(), ElementsAre(224));
  EXPECT_THAT(spec.model().mask_unit_attn(), ElementsAre(true, false));
  EXPECT_TRUE(spec.model().has_norm_target());
  EXPECT_FALSE(spec.model().norm_target());
  EXPECT_EQ(spec.optimizer().lr(), 1e-4);
  EXPECT_THAT(spec.data().crop_scale(), ElementsAre(0.1, 1.0));
  EXPECT_EQ(spec.data().path(), "/jobs/x.ts");
  EXPECT_EQ(spec.schedule().steps(), 1000000000);
  EXPECT_FALSE(spec.schedule().has_epochs());
}

TEST(JobYaml, SixtyFourBitIntegersAreExact) {
  EXPECT_EQ(Parsed(std::string(kSmall) + "seed: 9007199254740993\n").seed(), 9007199254740993ull);
  EXPECT_THAT(Problems(std::string(kSmall) + "seed: 18446744073709551616\n"),
              ElementsAre("job.yaml:6: seed: 18446744073709551616 is not allowed; it must be an integer in "
                          "[0, 18446744073709551615]"));
  EXPECT_THAT(Problems(std::string(kSmall) + "seed: -1\n").size(), 1u);
}

// Field report: a key given twice was accepted and one value won without a word.
TEST(JobYaml, DoubledKeysNameBothLines) {
  EXPECT_THAT(Problems(With("optimizer", "lr: 1e-4\n  lr: 2e-4")),
              ElementsAre("job.yaml:8: optimizer.lr: is given twice, on lines 7 and 8; keep one"));
  EXPECT_THAT(Problems(std::string(kSmall) + "name: b\n"),
              ElementsAre("job.yaml:6: name: is given twice, on lines 1 and 6; keep one"));
  EXPECT_THAT(Problems(std::string(kSmall) + "data:\n  source: ts\n"),
              ElementsAre("job.yaml:6: data: is given twice, on lines 2 and 6; keep one"));
}

// Field report: merge keys were kept as ordinary keys and did nothing.
TEST(JobYaml, MergeKeysAndAliasesAreRefusedByName) {
  for (const std::string text : {"optimizer: &base\n  lr: 1e-4\nstep:\n  <<: *base\n  batch_per_rank: 4\n",
                                 "optimizer: &base\n  lr: 1e-4\nstep:\n  batch_per_rank: 4\n  <<: *base\n",
                                 "optimizer: &base {lr: 1e-4}\nstep: {<<: [*base, *base]}\n"}) {
    const auto problems = Problems(kSmall + text);
    EXPECT_THAT(problems, ElementsAre(HasSubstr("optimizer: anchors (&name) are not supported"),
                                      HasSubstr("step.<<: merge keys (<<) are not supported")));
  }
  EXPECT_THAT(Problems("name: &n a\ndata: {source: synthetic, path: *n}\n"),
              ElementsAre(HasSubstr("job.yaml:1: name: anchors"), HasSubstr("job.yaml:2: data.path: aliases")));
  EXPECT_THAT(Problems(With("optimizer", "lr: !!float 1e-4")), ElementsAre(HasSubstr("job.yaml:7: optimizer.lr: tags")));
}

TEST(JobYaml, KeysArePlainWords) {
  EXPECT_THAT(Problems(std::string(kSmall) + "? [a, b]\n: 1\n"), ElementsAre(HasSubstr("a key must be a plain word")));
  EXPECT_THAT(Problems(With("optimizer", "{a: 1}: 2")), ElementsAre("job.yaml:7: optimizer: a key must be a plain word"));
}

// Field report: a mistyped or misplaced key was dropped and the default used.
TEST(JobYaml, UnknownKeysNameTheNearestOne) {
  EXPECT_THAT(Problems(With("optimizer", "weight_dcay: 0.05")),
              ElementsAre("job.yaml:7: optimizer.weight_dcay: unknown key; did you mean optimizer.weight_decay?"));
  EXPECT_THAT(Problems(std::string(kSmall) + "learning_rate: 1\n"),
              ElementsAre("job.yaml:6: learning_rate: unknown key; did you mean optimizer.lr?"));
  EXPECT_THAT(Problems(std::string(kSmall) + "num-epochs: 1\n"),
              ElementsAre("job.yaml:6: num-epochs: unknown key; did you mean schedule.epochs?"));
  EXPECT_THAT(Problems(With("optimizer", "Lr: 1")),
              ElementsAre("job.yaml:7: optimizer.Lr: unknown key; did you mean optimizer.lr?"));
  EXPECT_THAT(Problems(With("model", "lr: 1")), ElementsAre(HasSubstr("did you mean optimizer.lr?")));
  EXPECT_THAT(Problems(std::string(kSmall) + "optimizer.lr: 1\n"),
              ElementsAre("job.yaml:6: optimizer.lr: unknown key; did you mean optimizer.lr, written as lr below optimizer?"));
  EXPECT_THAT(Problems(std::string(kSmall) + "optimzer: {lr: 1}\n"), ElementsAre(HasSubstr("did you mean optimizer?")));
  EXPECT_THAT(Problems(std::string(kSmall) + "zzzzqqqq: 1\n"), ElementsAre(HasSubstr("configs/reference.yaml")));
  EXPECT_THAT(Problems(kSmall, {"optimzer.lr=1"}),
              ElementsAre("--set optimzer.lr=1: optimzer.lr: unknown key; did you mean optimizer.lr?"));
}

TEST(JobYaml, TheNearestKeyOfWhatPeopleWrite) {
  const std::pair<const char*, const char*> cases[] = {
      {"batch_size", "step.batch_per_rank"},     {"step.batch_size", "step.batch_per_rank"},
      {"data.batch_size", "step.batch_per_rank"}, {"epochs", "schedule.epochs"},
      {"Epochs", "schedule.epochs"},             {"total_steps", "schedule.steps"},
      {"max_steps", "schedule.steps"},           {"model.embed-dim", "model.embed_dim"},
      {"embedding_dim", "model.embed_dim"},      {"mask-ratio", "model.mask_ratio"},
      {"maskratio", "model.mask_ratio"},         {"model.input_sise", "model.input_size"},
      {"gpus", "resources.ranks"},               {"output", "output"},
      {"outputs", "output"},                     {"checkpoints", "checkpoint"},
      {"random_seed", "seed"},                   {"sed", "seed"},
      {"adam_beta1", "optimizer.beta1"},         {"data.normalise", "data.normalize"},
      {"train.lr", "optimizer.lr"},              {"scheduler", "schedule"},
      {"step.precison", "step.precision"},       {"qqqqqqqq", ""},
      {"tcp", ""}};
  for (const auto& [written, nearest] : cases) EXPECT_EQ(NearestJobKey(written), nearest) << written;
}

TEST(JobYaml, WrongTypesSayTheRightForm) {
  EXPECT_THAT(Problems(With("model", "input_size: 224")),
              ElementsAre("job.yaml:7: model.input_size: \"224\" is a single value; write a list, [224]"));
  EXPECT_THAT(Problems(With("model", "embed_dim: [96]")),
              ElementsAre("job.yaml:7: model.embed_dim: is a list; it must be an integer in [1, 4096]"));
  EXPECT_THAT(Problems(With("model", "embed_dim: 9.6e1")),
              ElementsAre("job.yaml:7: model.embed_dim: \"9.6e1\" is not an integer in [1, 4096]"));
  EXPECT_THAT(Problems(With("model", "embed_dim: 010")), ElementsAre(HasSubstr("leading zero")));
  EXPECT_THAT(Problems(With("model", "embed_dim: 0x10")), ElementsAre(HasSubstr("is not an integer")));
  EXPECT_THAT(Problems(With("model", "embed_dim: \"96\"")), ElementsAre(HasSubstr("in quotes")));
  EXPECT_THAT(Problems(With("model", "norm_target: yes")),
              ElementsAre("job.yaml:7: model.norm_target: \"yes\" is not true or false"));
  EXPECT_THAT(Problems(With("model", "norm_target: True")).size(), 1u);
  EXPECT_THAT(Problems(With("optimizer", "lr: fast")), ElementsAre(HasSubstr("\"fast\" is not a number in (0, inf)")));
  EXPECT_THAT(Problems(With("optimizer", "lr: .inf")).size(), 1u);
  EXPECT_THAT(Problems(With("optimizer", "lr: nan")).size(), 1u);
  EXPECT_THAT(Problems(With("optimizer", "lr: 1e999")).size(), 1u);
  EXPECT_THAT(Problems(With("optimizer", "lr: {a: 1}")), ElementsAre(HasSubstr("is a group of keys")));
  EXPECT_THAT(Problems(With("optimizer", "lr:")), ElementsAre(HasSubstr("job.yaml:7: optimizer.lr: has no value")));
  EXPECT_THAT(Problems(With("model", "stages: [1, two]")), ElementsAre(HasSubstr("\"two\" is not")));
  EXPECT_THAT(Problems(With("model", "stages: [1, [2]]")), ElementsAre(HasSubstr("element 2")));
  EXPECT_THAT(Problems(std::string(kSmall) + "model: big\n"), ElementsAre(HasSubstr("job.yaml:6: model: is a section")));
}

TEST(JobYaml, RangesWordsAndLengths) {
  EXPECT_THAT(Problems(With("model", "mask_ratio: 1.5")),
              ElementsAre("job.yaml:7: model.mask_ratio: 1.5 is not allowed; it must be in (0, 1)"));
  for (const char* ratio : {"0", "1", "-0.1", "1.5"}) {
    EXPECT_EQ(Problems(With("model", std::string("mask_ratio: ") + ratio)).size(), 1u) << ratio;
  }
  EXPECT_THAT(Problems(With("step", "batch_per_rank: 0")), ElementsAre(HasSubstr("0 is not allowed; it must be in [1, 65536]")));
  EXPECT_THAT(Problems(With("step", "precision: bf61")),
              ElementsAre("job.yaml:7: step.precision: \"bf61\" is not one of fp32, bf16, fp16; did you mean bf16?"));
  EXPECT_THAT(Problems(With("model", "input_size: [1, 2, 3, 4]")), ElementsAre(HasSubstr("4 elements were given")));
  EXPECT_THAT(Problems(With("model", "input_size: []")), ElementsAre(HasSubstr("the list is empty")));
  EXPECT_THAT(Problems(With("model", "stages: [1, 0]")), ElementsAre(HasSubstr("0 (element 2) is not allowed")));
}

TEST(JobYaml, AllProblemsAtOnce) {
  const auto problems = Problems("nam: x\nmodel:\n  embed_dim: -1\n  stages: 3\noptimizer:\n  lr: x\nstep: 5\n");
  EXPECT_THAT(problems,
              ElementsAre(HasSubstr("job.yaml:1: nam: unknown key; did you mean name?"),
                          HasSubstr("job.yaml:3: model.embed_dim:"), HasSubstr("job.yaml:4: model.stages:"),
                          HasSubstr("job.yaml:6: optimizer.lr:"), HasSubstr("job.yaml:7: step:"),
                          "job.yaml: name: is missing; give text",
                          HasSubstr("job.yaml: data.source: is missing; give one of ts, npy, edf, images, synthetic")));
  std::string many;
  for (int i = 0; i < 500; ++i) many += "k" + std::to_string(i) + ": 1\n";
  EXPECT_THAT(Problems(many).back(), HasSubstr("more problems"));
}

TEST(JobYaml, NotAJobAtAll) {
  EXPECT_THAT(Problems("")[0], HasSubstr("the file is empty"));
  EXPECT_THAT(Problems("- a\n- b\n")[0], HasSubstr("is not a group of keys"));
  EXPECT_THAT(Problems("just words")[0], HasSubstr("is not a group of keys"));
  EXPECT_THAT(Problems("a: [1\n"), ElementsAre(HasSubstr("job.yaml:2: not valid YAML")));
  EXPECT_THAT(Problems(std::string(70000, '#')), ElementsAre(HasSubstr("at most 65536 are read")));
}

// Field report: names that broke other programs' scripts and listings.
TEST(JobYaml, NamesThatBreakThingsAreRefused) {
  for (const std::string name : {"Big run", "a|b", "x(1)", "-rf", "..", "line1\\nline2", "$(touch /tmp/p)", "", "🧠", "été",
                                 ".x", "a/b", "a..b"}) {
    const auto problems = Problems("name: \"" + name + "\"\ndata: {source: synthetic}\n");
    ASSERT_EQ(problems.size(), 1u) << name;
    EXPECT_THAT(problems[0], HasSubstr("job.yaml:1: name: ")) << name;
    EXPECT_THAT(problems[0], HasSubstr("letters, digits")) << name;
  }
  EXPECT_EQ(Problems("name: " + std::string(300, 'a') + "\ndata: {source: synthetic}\n").size(), 1u);
  EXPECT_EQ(Parsed("name: " + std::string(63, 'a') + "\ndata: {source: synthetic}\n").name().size(), 63u);
  EXPECT_EQ(Parsed("name: 007\ndata: {source: synthetic}\n").name(), "007");
}

TEST(JobYaml, PathsAreResolvedAgainstTheFile) {
  const auto path = [](const std::string& written) {
    return Parsed("name: a\ndata: {source: npy, path: " + written + "}\n").data().path();
  };
  EXPECT_EQ(path("x.npy"), "/jobs/x.npy");
  EXPECT_EQ(path("../x.npy"), "/x.npy");
  EXPECT_EQ(path("./d/"), "/jobs/d");
  EXPECT_EQ(path("/abs/x.npy"), "/abs/x.npy");
  EXPECT_EQ(path("\"my \\\"runs\\\"/été 1\""), "/jobs/my \"runs\"/été 1");
  EXPECT_THAT(Problems(With("output", "folder: ~/runs")), ElementsAre(HasSubstr("'~' is not expanded")));
  EXPECT_THAT(Problems(With("output", "folder: \"a\\0b\"")), ElementsAre(HasSubstr("control character")));
  EXPECT_THAT(Problems(With("output", "folder: \"a\\nb\"")), ElementsAre(HasSubstr("control character")));
  EXPECT_THAT(Problems(With("output", "folder: \"\"")), ElementsAre(HasSubstr("the path is empty")));
}

TEST(JobYaml, ReadsAFileAgainstItsRealFolder) {
  std::string pattern = testing::TempDir() + "/job_yaml_test-XXXXXX";
  ASSERT_NE(::mkdtemp(pattern.data()), nullptr);
  const std::string folder = std::filesystem::canonical(pattern).string();
  const std::string file = folder + "/job.yaml";
  ASSERT_TRUE(WriteFileAtomic(file, "name: a\ndata: {source: npy, path: d/x.npy}\n").ok());
  EXPECT_EQ(ReadJobYaml(file)->data().path(), folder + "/d/x.npy");
  ASSERT_TRUE(WriteFileAtomic(file, "name: a\n").ok());
  EXPECT_THAT(std::string(ReadJobYaml(file).status().message()), HasSubstr(file + ": data.source: is missing"));
  EXPECT_EQ(ReadJobYaml(folder + "/none.yaml").status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(RemoveTree(folder).ok());
}

TEST(JobYaml, OverridesComeAfterTheFile) {
  const v1::JobSpec spec = Parsed(With("optimizer", "lr: 1"), {"optimizer.lr=2", "optimizer.lr=1e-3", "name=b",
                                                               "model.input_size=[96, 160]", "output.folder=out"});
  EXPECT_EQ(spec.optimizer().lr(), 1e-3);
  EXPECT_EQ(spec.name(), "b");
  EXPECT_THAT(spec.model().input_size(), ElementsAre(96, 160));
  EXPECT_EQ(spec.output().folder(), "/here/out") << "relative to where the command is typed";
}

TEST(JobYaml, AnOverrideMendsTheFile) {
  EXPECT_THAT(Problems("data: {source: synthetic}\noptimizer: {lr: x}\n", {"name=a", "optimizer.lr=1"}), ElementsAre());
  const v1::JobSpec spec = Parsed(kSmall, {"schedule.epochs=null", "schedule.steps=5"});
  EXPECT_FALSE(spec.schedule().has_epochs());
  EXPECT_EQ(spec.schedule().steps(), 5);
  EXPECT_THAT(Problems(kSmall, {"name=null"}), ElementsAre(HasSubstr("name: is missing")));
}

TEST(JobYaml, WrongOverrides) {
  EXPECT_THAT(Problems(kSmall, {"optimizer.lr"}), ElementsAre(HasSubstr("write it as key=value")));
  EXPECT_THAT(Problems(kSmall, {"optimizer.lr="}), ElementsAre(HasSubstr("has no value")));
  EXPECT_THAT(Problems(kSmall, {"optimizer=1"}), ElementsAre(HasSubstr("is a section")));
  EXPECT_THAT(Problems(kSmall, {"model.stages=[1"}), ElementsAre(HasSubstr("not valid YAML")));
  EXPECT_THAT(Problems(kSmall, {"model.stages=3"}), ElementsAre(HasSubstr("write a list, [3]")));
  EXPECT_THAT(Problems(kSmall, {"step.batch_per_rank=0"}),
              ElementsAre("--set step.batch_per_rank=0: step.batch_per_rank: 0 is not allowed; it must be in [1, 65536]"));
}

TEST(JobYaml, EveryDefaultIsLegalAndFillingTwiceChangesNothing) {
  v1::JobSpec spec = Parsed(kSmall);
  FillDefaults(&spec);
  for (const JobKey& key : JobKeys()) {
    if (key.options->def().empty()) continue;
    EXPECT_TRUE(IsSet(spec, key)) << key.path << ": its default does not parse";
    EXPECT_EQ(ValueProblem(spec, key, false), std::nullopt) << key.path;
  }
  const v1::JobSpec once = spec;
  FillDefaults(&spec);
  EXPECT_TRUE(MessageDifferencer::Equals(once, spec));
  EXPECT_EQ(spec.optimizer().blr(), 8e-4);
  EXPECT_THAT(spec.model().input_size(), ElementsAre(224, 224));
  EXPECT_EQ(ValidateJob(spec), std::vector<std::string>{});
}

TEST(JobYaml, FillingKeepsWhatIsGiven) {
  v1::JobSpec spec = Parsed(With("model", "input_size: [224]\n  norm_target: false\n  in_chans: 8"));
  FillDefaults(&spec);
  EXPECT_THAT(spec.model().input_size(), ElementsAre(224));
  EXPECT_FALSE(spec.model().norm_target());
  EXPECT_EQ(spec.model().in_chans(), 8);
  EXPECT_FALSE(spec.optimizer().has_lr()) << "has no fixed default";
}

TEST(JobYaml, WritingReadsBack) {
  v1::JobSpec spec = Parsed(
      "name: \"true\"\nseed: 18446744073709551615\nmodel:\n  stages: [1, 1, 2]\n  mask_unit_attn: [true, true, false]\n"
      "data: {source: images, path: \"/a b/\\\"é#\", mean: [0.1, 1e-300, 123456789.123], std: [1, 2, 3]}\n"
      "optimizer: {lr: 0.1}\nschedule: {steps: 7}\n");
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(MessageDifferencer::Equals(Parsed(ToJobYaml(spec)), spec)) << ToJobYaml(spec);
    FillDefaults(&spec);
  }
  const KeyOrigins none;
  EXPECT_TRUE(MessageDifferencer::Equals(Parsed(ExplainedJobYaml(spec, none)), spec)) << ExplainedJobYaml(spec, none);
}

TEST(JobYaml, ExplainedSaysWhereEachValueCameFrom) {
  JobYamlOptions options;
  options.overrides = {"step.batch_per_rank=8"};
  KeyOrigins origins;
  auto spec = ParseJobYaml(With("optimizer", "lr: 1"), options, &origins);
  ASSERT_TRUE(spec.ok());
  FillDefaults(&*spec);
  const std::string text = ExplainedJobYaml(*spec, origins);
  EXPECT_THAT(text, testing::ContainsRegex("lr: 1\\.0 +# job\\.yaml:7\n"));
  EXPECT_THAT(text, testing::ContainsRegex("batch_per_rank: 8 +# --set\n"));
  EXPECT_THAT(text, testing::ContainsRegex("accumulation: 1 +# default\n"));
  EXPECT_THAT(text, HasSubstr("  # embed_dim: not set."));
}

TEST(JobYaml, TheReferenceIsWhatJobProtoSays) {
  const std::string path = std::string(std::getenv("HIERAD_SOURCE_DIR")) + "/configs/reference.yaml";
  if (std::getenv("HIERAD_WRITE_REFERENCE")) {
    ASSERT_TRUE(WriteFileAtomic(path, ReferenceYaml()).ok());
  }
  const auto committed = ReadFile(path, 1 << 20);
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(*committed, ReferenceYaml()) << "run this test with HIERAD_WRITE_REFERENCE=1 to write it anew";
}

TEST(JobYaml, TheReferenceIsALegalJobWithEveryKey) {
  const std::string text = ReferenceYaml();
  v1::JobSpec spec = Parsed(text);
  for (const JobKey& key : JobKeys()) {
    EXPECT_THAT(text, HasSubstr(key.field->name() + ":")) << key.path;
    EXPECT_FALSE(key.options->about().empty()) << key.path;
  }
  v1::JobSpec defaults = Parsed("name: reference\ndata: {source: synthetic}\nschedule: {epochs: 100}\n");
  FillDefaults(&defaults);
  FillDefaults(&spec);
  EXPECT_TRUE(MessageDifferencer::Equals(spec, defaults));
  EXPECT_EQ(ValidateJob(spec), std::vector<std::string>{});
}

// Mutations of a legal job: each is refused with lines, or read and then written back the same.
TEST(JobYaml, DamagedFilesAreRefusedOrRead) {
  const std::string reference = ReferenceYaml();
  static constexpr char kBytes[] = "\n\t :#-[]{}&*!|>'\"%@`,?<\\0e.~\x01\x04\xff\xc3";
  int read = 0;
  for (uint64_t i = 0; i < 1000; ++i) {
    const RandomStream random{1, Draw::kSynthetic, 0, i};
    std::string text = reference;
    const uint32_t changes = 1 + random.Word(0) % 4;
    for (uint32_t c = 0; c < changes; ++c) {
      const size_t at = random.Word(4 * c + 1) % text.size();
      const size_t size = std::min<size_t>(random.Word(4 * c + 2) % 40, text.size() - at);
      const char byte = kBytes[random.Word(4 * c + 3) % (sizeof kBytes - 1)];
      switch (random.Word(4 * c + 4) % 4) {
        case 0: text[at] = byte; break;
        case 1: text.insert(at, 1 + size % 3, byte); break;
        case 2: text.erase(at, size); break;
        default: text.insert(random.Word(4 * c + 5) % text.size(), text.substr(at, size)); break;
      }
    }
    const auto spec = ParseJobYaml(text, {});
    if (!spec.ok()) {
      for (const std::string& line : Split(std::string(spec.status().message()), '\n')) {
        ASSERT_TRUE(line.rfind("job.yaml:", 0) == 0 || line.rfind("and ", 0) == 0) << line;
        ASSERT_TRUE(IsUtf8(line)) << i;
      }
      continue;
    }
    ++read;
    const auto again = ParseJobYaml(ToJobYaml(*spec), {});
    ASSERT_TRUE(again.ok()) << again.status() << "\n" << ToJobYaml(*spec);
    ASSERT_TRUE(MessageDifferencer::Equals(*spec, *again)) << text;
    v1::JobSpec filled = *spec;
    FillDefaults(&filled);
    ValidateJob(filled);
  }
  EXPECT_GT(read, 30) << "comments are mutated too, so many stay legal";
  EXPECT_LT(read, 970);
}

TEST(JobYaml, ListsOfTextAreReadAndWritten) {
  const auto spec = ParseJobYaml("name: a\ndata: {source: edf, path: /x, channels: [Fp1, 'EEG C3-Ref', T7|T3], band_pass: [0.5, 0]}\nschedule: {epochs: 1}\n", {});
  ASSERT_TRUE(spec.ok()) << spec.status();
  ASSERT_EQ(spec->data().channels_size(), 3);
  EXPECT_EQ(spec->data().channels(1), "EEG C3-Ref");
  const auto again = ParseJobYaml(ToJobYaml(*spec), {});
  ASSERT_TRUE(again.ok()) << again.status() << ToJobYaml(*spec);
  EXPECT_EQ(again->SerializeAsString(), spec->SerializeAsString());
  const auto bad = ParseJobYaml("name: a\ndata: {source: edf, path: /x, channels: [Fp1, \"a\\tb\"]}\nschedule: {epochs: 1}\n", {});
  ASSERT_FALSE(bad.ok());
  EXPECT_THAT(std::string(bad.status().message()), HasSubstr("data.channels: \"a\\x09b\" has a control character in it (element 2)"));
}

}  // namespace
}  // namespace hierad
