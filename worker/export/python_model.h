// The line of Python that makes the model which a run's weights fit: FAIR's (`hiera-transformer`), or timm's, and how the
// parameters are called there.
#pragma once

#include <optional>
#include <string>

#include "base/plan/geometry.h"

namespace hierad {

// `hiera.MaskedAutoencoderHiera(q_pool=2, in_chans=8)`: FAIR's class with every argument that differs from its default.
std::string FairModel(const Geometry& geometry);
// `timm.create_model("hiera_base_224", num_classes=0, q_pool=2, in_chans=8)`: the encoder, and the head of a classifier.
std::string TimmModel(const Geometry& geometry);

// timm's name of a parameter of FAIR's name. timm's Hiera has no decoder and no fusion heads: nullopt.
std::optional<std::string> TimmName(const std::string& name);

}  // namespace hierad
