// A folder of images: each sub-folder is a class (all images below it belong to it), or images lie directly in the
// folder and have no label. JPEG and PNG by their names' endings; other files are counted and left alone.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/plan/geometry.h"
#include "base/random.h"
#include "hierad/v1/job.pb.h"
#include "worker/data/dataset.h"
#include "worker/data/image_pixels.h"

namespace hierad {

absl::StatusOr<std::unique_ptr<Dataset>> OpenImageFolder(const v1::DataSpec& data, const std::string& path, const Geometry& geometry);

// What a pixel's value in [0, 1] loses, and is divided by, per channel.
void ImageStatistics(const v1::DataSpec& data, int channels, std::vector<double>* mean, std::vector<double>* spread);

// The region of the random resized crop of this visit: ten tries of an area fraction and an aspect ratio (log-uniform),
// then the largest centred region of a legal ratio.
Region RandomRegion(const v1::DataSpec& data, const Visit& visit, int height, int width);
// 7/8 of the largest centred region of the output's aspect ratio (256 -> 224).
Region CentreRegion(int height, int width, int out_height, int out_width);

}  // namespace hierad
