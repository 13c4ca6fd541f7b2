#include "worker/metrics/picture.h"

#include <algorithm>
#include <cmath>
#include <png.h>

#include "absl/strings/str_cat.h"

namespace hierad {
namespace {

struct Rgb {
  uint8_t r, g, b;
};
constexpr Rgb kGrey{128, 128, 128}, kShade{232, 232, 238}, kBlue{31, 111, 180}, kRed{214, 60, 48}, kLine{200, 204, 210};
constexpr int kGap = 4;

Picture Blank(int width, int height) {
  return {width, height, std::vector<uint8_t>(size_t(width) * size_t(height) * 3, 255)};
}

void Put(Picture* p, int x, int y, Rgb color) {
  if (x < 0 || y < 0 || x >= p->width || y >= p->height) return;
  uint8_t* at = &p->rgb[(size_t(y) * size_t(p->width) + size_t(x)) * 3];
  at[0] = color.r, at[1] = color.g, at[2] = color.b;
}

void Fill(Picture* p, int left, int top, int width, int height, Rgb color) {
  for (int y = top; y < top + height; ++y) {
    for (int x = left; x < left + width; ++x) Put(p, x, y, color);
  }
}

// Two pixels wide, so that a trace can be seen.
void Line(Picture* p, double x0, double y0, double x1, double y1, Rgb color) {
  const int steps = std::max(1, int(std::ceil(std::max(std::fabs(x1 - x0), std::fabs(y1 - y0)))));
  for (int i = 0; i <= steps; ++i) {
    const int x = int(std::lround(x0 + (x1 - x0) * i / steps)), y = int(std::lround(y0 + (y1 - y0) * i / steps));
    Put(p, x, y, color);
    Put(p, x, y + 1, color);
  }
}

uint8_t Level(double value) { return std::isfinite(value) ? uint8_t(std::lround(255 * std::clamp(value, 0.0, 1.0))) : 255; }

}  // namespace

Picture DrawImages(const Reconstruction& r, const std::vector<double>& mean, const std::vector<double>& spread) {
  const int h = int(r.size[0]), w = int(r.size[1]);
  const int zoom = std::max(1, 96 / std::max(h, w));   // small images would be stamps
  const int samples = int(r.samples), tile_w = w * zoom, tile_h = h * zoom;
  Picture picture = Blank(3 * tile_w + 4 * kGap, samples * (tile_h + kGap) + kGap);
  const int64_t plane = int64_t(h) * w;
  const auto value = [&](const std::vector<float>& from, int64_t sample, int64_t channel, int64_t at) {
    const auto pick = [&](const std::vector<double>& list, double none) {
      return list.empty() ? none : list[size_t(std::min<int64_t>(channel, int64_t(list.size()) - 1))];
    };
    return Level(from[size_t((sample * r.channels + channel) * plane + at)] * pick(spread, 1) + pick(mean, 0));
  };
  for (int s = 0; s < samples; ++s) {
    for (int y = 0; y < tile_h; ++y) {
      for (int x = 0; x < tile_w; ++x) {
        const int64_t at = int64_t(y / zoom) * w + x / zoom;
        const bool masked = r.masked[size_t(int64_t(s) * r.channels * plane + at)] != 0;
        const auto color = [&](const std::vector<float>& from) {
          if (r.channels < 3) return Rgb{value(from, s, 0, at), value(from, s, 0, at), value(from, s, 0, at)};
          return Rgb{value(from, s, 0, at), value(from, s, 1, at), value(from, s, 2, at)};
        };
        const int top = kGap + s * (tile_h + kGap) + y;
        Put(&picture, kGap + x, top, color(r.input));
        Put(&picture, 2 * kGap + tile_w + x, top, masked ? kGrey : color(r.input));
        Put(&picture, 3 * kGap + 2 * tile_w + x, top, color(r.predicted));
      }
    }
  }
  return picture;
}

Picture DrawSignals(const Reconstruction& r) {
  constexpr int kWidth = 960, kStrip = 90;
  const int64_t length = r.size[0], channels = std::min<int64_t>(r.channels, 4);
  Picture picture = Blank(kWidth + 2 * kGap, int(r.samples * channels) * (kStrip + kGap) + kGap);
  int top = kGap;
  for (int64_t s = 0; s < r.samples; ++s) {
    for (int64_t c = 0; c < channels; ++c, top += kStrip + kGap) {
      const size_t begin = size_t((s * r.channels + c) * length);
      double low = INFINITY, high = -INFINITY;
      for (int64_t t = 0; t < length; ++t) {
        for (const double v : {r.input[begin + size_t(t)], r.predicted[begin + size_t(t)]}) {
          if (std::isfinite(v)) low = std::min(low, v), high = std::max(high, v);
        }
      }
      if (!(high > low)) low = std::isfinite(low) ? low - 1 : 0, high = low + 2;
      const auto x_of = [&](int64_t t) { return kGap + double(t) * (kWidth - 1) / double(std::max<int64_t>(1, length - 1)); };
      const auto y_of = [&](double v) { return top + 3 + (kStrip - 8) * (high - v) / (high - low); };
      for (int64_t t = 0; t < length; ++t) {
        if (r.masked[begin + size_t(t)] == 0) continue;
        const int left = int(x_of(t) - 0.5 * kWidth / double(length)), right = int(x_of(t) + 0.5 * kWidth / double(length)) + 1;
        Fill(&picture, left, top, right - left, kStrip, kShade);
      }
      const auto trace = [&](const std::vector<float>& from, bool masked_only, Rgb color) {
        for (int64_t t = 1; t < length; ++t) {
          const size_t at = begin + size_t(t);
          if (masked_only && (r.masked[at] == 0 || r.masked[at - 1] == 0)) continue;
          if (!std::isfinite(from[at]) || !std::isfinite(from[at - 1])) continue;
          Line(&picture, x_of(t - 1), y_of(from[at - 1]), x_of(t), y_of(from[at]), color);
        }
      };
      trace(r.input, false, kBlue);
      trace(r.predicted, true, kRed);
      Fill(&picture, 0, top + kStrip, picture.width, 1, kLine);
    }
  }
  return picture;
}

absl::StatusOr<std::string> EncodePng(const Picture& picture) {
  png_image image{};
  image.version = PNG_IMAGE_VERSION;
  image.width = png_uint_32(picture.width);
  image.height = png_uint_32(picture.height);
  image.format = PNG_FORMAT_RGB;
  std::string out(PNG_IMAGE_PNG_SIZE_MAX(image), '\0');
  png_alloc_size_t bytes = out.size();
  if (png_image_write_to_memory(&image, out.data(), &bytes, 0, picture.rgb.data(), 0, nullptr) == 0) {
    return absl::InternalError(absl::StrCat("a picture of ", picture.width, " x ", picture.height, " could not be made: ", image.message));
  }
  out.resize(bytes);
  return out;
}

}  // namespace hierad
