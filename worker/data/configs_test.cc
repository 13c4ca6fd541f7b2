// Every job in configs/ is legal, and says what its comments say.
#include <cstdlib>
#include <filesystem>

#include "base/fs.h"
#include "base/job_validate.h"
#include "base/job_yaml.h"
#include "gtest/gtest.h"
#include "worker/data/loader.h"

namespace hierad {
namespace {

std::string Configs() {
  const char* root = std::getenv("HIERAD_SOURCE_DIR");
  return std::string(root ? root : ".") + "/configs";
}

TEST(Configs, EveryJobIsLegal) {
  int jobs = 0;
  for (const auto& entry : std::filesystem::directory_iterator(Configs())) {
    const std::string name = entry.path().filename();
    if (entry.path().extension() != ".yaml" || name == "hierad.yaml" || name == "reference.yaml") continue;   // not jobs
    auto spec = ReadJobYaml(entry.path());
    ASSERT_TRUE(spec.ok()) << spec.status();
    FillDefaults(&*spec);
    EXPECT_TRUE(CheckJob(*spec).ok()) << name << ": " << CheckJob(*spec);
    ++jobs;
  }
  EXPECT_GE(jobs, 3);
}

TEST(Configs, QuickstartIsTheRecipe) {
  auto spec = ReadJobYaml(Configs() + "/quickstart.yaml");
  ASSERT_TRUE(spec.ok()) << spec.status();
  FillDefaults(&*spec);
  EXPECT_EQ(EffectiveBatch(*spec), 64);
  const auto length = RunLength::For(*spec, 268);
  ASSERT_TRUE(length.ok()) << length.status();
  EXPECT_EQ(length->total_steps, 600);
  const auto geometry = Geometry::From(spec->model());
  ASSERT_TRUE(geometry.ok()) << geometry.status();
  EXPECT_EQ(geometry->num_mask_units, 14);
  EXPECT_EQ(geometry->num_kept, 5);
  EXPECT_EQ(geometry->encoder_dim_out, 128);
  EXPECT_FALSE(spec->eval().has_path());   // TEST takes no part in training
}

}  // namespace
}  // namespace hierad
