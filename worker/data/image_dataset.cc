#include "worker/data/image_dataset.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/fs.h"
#include "base/job_paths.h"
#include "base/limits.h"
#include "base/status.h"

namespace hierad {
namespace {

constexpr int kFolderDepth = 16;   // also ends a circle of links
constexpr int64_t kDeepLooks = 16;   // files that tell whether a folder's images have 16 bits

bool IsImageName(const std::string& name) {
  for (const char* end : {".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff"})
    if (absl::EndsWithIgnoreCase(name, end)) return true;
  return false;
}

// Paths below the root and their classes, in the order of their bytes.
struct Listing {
  std::string names;                // one after the other: a million paths in one allocation
  std::vector<uint64_t> begins;     // and the end of the last
  std::vector<int32_t> labels;
  int64_t other_files = 0;

  int64_t count() const { return labels.size(); }
  std::string Name(uint64_t sample) const { return names.substr(begins[sample], begins[sample + 1] - begins[sample]); }
};

class FolderWalk {
 public:
  FolderWalk(std::string root, Listing* listing) : root_(std::move(root)), listing_(listing) { listing_->begins.push_back(0); }

  struct Entries {
    std::vector<std::string> folders, images;   // names, sorted
  };

  // Entries of root/below that are not hidden.
  absl::StatusOr<Entries> List(const std::string& below) const {
    const std::string path = below.empty() ? root_ : absl::StrCat(root_, "/", below);
    ASSIGN_OR_RETURN(UniqueFd fd, OpenJobPath(path, O_RDONLY | O_DIRECTORY));
    std::unique_ptr<DIR, int (*)(DIR*)> folder(fdopendir(fd.get()), closedir);
    if (!folder) return ErrnoStatus(errno, "cannot list", path);
    fd.release();   // the folder's now
    Entries entries;
    for (;;) {
      errno = 0;
      const dirent* entry = readdir(folder.get());
      if (!entry) break;
      const std::string name = entry->d_name;
      if (name[0] == '.') continue;
      unsigned char type = entry->d_type;
      if (type == DT_LNK || type == DT_UNKNOWN) {
        struct stat status;
        if (StatJobPath(absl::StrCat(path, "/", name), &status).ok()) type = S_ISDIR(status.st_mode) ? DT_DIR : S_ISREG(status.st_mode) ? DT_REG : DT_UNKNOWN;
      }
      if (type == DT_DIR) entries.folders.push_back(name);
      else if (IsImageName(name)) entries.images.push_back(name);   // a broken link is found when it is read
      else ++listing_->other_files;
    }
    if (errno != 0) return ErrnoStatus(errno, "cannot list", path);
    std::sort(entries.folders.begin(), entries.folders.end());
    std::sort(entries.images.begin(), entries.images.end());
    return entries;
  }

  absl::Status AddAll(const std::string& below, int32_t label, int depth) {
    if (depth > kFolderDepth) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path: ", Printable(absl::StrCat(root_, "/", below)), " is more than ", kFolderDepth, " folders deep (a circle of links?)"));
    ASSIGN_OR_RETURN(const Entries entries, List(below));
    RETURN_IF_ERROR(Add(below, entries.images, label));
    for (const std::string& folder : entries.folders) RETURN_IF_ERROR(AddAll(absl::StrCat(below, "/", folder), label, depth + 1));
    return absl::OkStatus();
  }

  absl::Status Add(const std::string& below, const std::vector<std::string>& images, int32_t label) {
    for (const std::string& image : images) {
      absl::StrAppend(&listing_->names, below, below.empty() ? "" : "/", image);
      listing_->begins.push_back(listing_->names.size());
      listing_->labels.push_back(label);
    }
    if (listing_->count() > limits::kImageFiles) return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", Printable(root_), ": more than ", limits::kImageFiles, " images"));
    return absl::OkStatus();
  }

 private:
  const std::string root_;
  Listing* const listing_;
};

}  // namespace

void ImageStatistics(const v1::DataSpec& data, int channels, std::vector<double>* mean, std::vector<double>* spread) {
  static constexpr double kMean[] = {0.485, 0.456, 0.406}, kStd[] = {0.229, 0.224, 0.225};   // ImageNet's
  for (int c = 0; c < channels; ++c) {
    mean->push_back(data.mean_size() ? data.mean(c) : channels == 3 ? kMean[c] : 0.5);
    spread->push_back(data.std_size() ? data.std(c) : channels == 3 ? kStd[c] : 0.5);
  }
}

namespace {

class ImageFolder : public Dataset {
 public:
  ImageFolder(const v1::DataSpec& data, std::string root, const Geometry& geometry)
      : data_(data), root_(std::move(root)), channels_(geometry.spec.in_chans()),
        height_(static_cast<int>(geometry.input_size[0])), width_(static_cast<int>(geometry.input_size[1])),
        format_(RowFormat::Plain(geometry)) {}

  absl::Status Scan() {
    FolderWalk walk(root_, &listing_);
    ASSIGN_OR_RETURN(const FolderWalk::Entries top, walk.List(""));
    if (!top.folders.empty() && !top.images.empty())
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.path ", Printable(root_), " holds both images (", Printable(top.images[0], 100), ") and folders (", Printable(top.folders[0], 100), "); put every image into its class's folder, or all of them into one"));
    RETURN_IF_ERROR(walk.Add("", top.images, -1));
    for (const std::string& folder : top.folders) {
      RETURN_IF_ERROR(walk.AddAll(folder, static_cast<int32_t>(class_names_.size()), 1));
      class_names_.push_back(folder);
    }
    if (listing_.count() == 0)
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat("data.path ", Printable(root_), ": 0 images (.jpg, .jpeg, .png, .webp, .tif, .tiff) among ", top.folders.size(), " folders and ", listing_.other_files, " other files; at least 1 is needed"));
    ASSIGN_OR_RETURN(deep_, HoldsDeep());
    format_.type = deep_ ? DType::kI16 : DType::kU8;
    format_.rules.flip = data_.flip();
    std::vector<double> mean, spread;
    ImageStatistics(data_, channels_, &mean, &spread);
    const double most = deep_ ? 65535 : 255, zero = deep_ ? -32768 : 0;
    for (int c = 0; c < channels_; ++c) {
      format_.offset[c] = static_cast<float>(most * mean[c] + zero);
      format_.scale[c] = static_cast<float>(1 / (most * spread[c]));
    }
    return absl::OkStatus();
  }

  int64_t count() const override { return listing_.count(); }
  int64_t num_classes() const override { return class_names_.size(); }
  std::string class_name(int64_t label) const override { return class_names_[label]; }
  int64_t label(uint64_t sample) const override { return listing_.labels[sample]; }
  std::string SampleName(uint64_t sample) const override { return absl::StrCat(Printable(Path(sample)), " (sample ", sample, ")"); }
  std::string Describe() const override {
    return absl::StrCat("images: ", count(), " in ", class_names_.size(), " classes, to ", channels_, "x", height_, "x", width_, " (bicubic, antialiased)",
                        listing_.other_files ? absl::StrCat(", ", listing_.other_files, " other files left alone") : "");
  }

  int64_t bytes_read() const override { return bytes_; }
  std::vector<std::pair<std::string, double>> stages() const override {
    return {{"read", double(read_ns_) / 1e9}, {"decode", double(decode_ns_) / 1e9}, {"resize", double(resize_ns_) / 1e9}};
  }

  const RowFormat& row_format() const override { return format_; }

  // The flip and the scaling are the step's.
  absl::Status ReadRow(const Visit& visit, void* row) const override {
    const auto region = [&](int height, int width) {
      return visit.augment ? RandomRegion(data_, visit, height, width) : CentreRegion(height, width, height_, width_);
    };
    ASSIGN_OR_RETURN(const Decoded image, Decode(visit.sample, region));
    const int channels = image.pixels->channels;
    if (channels != channels_ && !(channels == 1 && channels_ == 3) && !(channels == 3 && channels_ == 1))
      return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(SampleName(visit.sample), ": ", channels, channels == 1 ? " channel" : " channels", ", model.in_chans is ", channels_));
    const auto resizing = Clock::System().Monotonic();
    if (deep_) {
      FillRow(image, static_cast<uint16_t*>(row));
      // Rows of 16 bits have a sign; their offset takes it back.
      for (int64_t i = 0; i < format_.rules.channels * format_.rules.samples; ++i) static_cast<uint16_t*>(row)[i] ^= 0x8000;
    } else {
      FillRow(image, static_cast<uint8_t*>(row));
    }
    Count(&resize_ns_, Clock::System().Monotonic() - resizing);
    return absl::OkStatus();
  }

 private:
  struct Decoded {
    std::shared_ptr<const Pixels> pixels;
    Box box;
  };

  // [C, H, W]. Gray becomes RGB, and RGB gray where the model takes one channel: ITU-R 601-2 luma, in Pillow's arithmetic.
  template <typename V>
  void FillRow(const Decoded& image, V* row_CHW) const {
    const int channels = image.pixels->channels;
    if (channels == channels_) return ResizePlanes(*image.pixels, image.box, height_, width_, row_CHW);
    const int64_t plane = int64_t{height_} * width_;
    std::vector<V> planes(plane * channels);
    ResizePlanes(*image.pixels, image.box, height_, width_, planes.data());
    for (int64_t i = 0; i < plane; ++i) {
      if (channels == 3) row_CHW[i] = static_cast<V>((19595u * planes[i] + 38470u * planes[plane + i] + 7471u * planes[2 * plane + i] + 0x8000u) >> 16);
      else for (int c = 0; c < channels_; ++c) row_CHW[c * plane + i] = planes[i];
    }
  }

  // A folder is of 16 bits where one of a few files, from all of it, is. Always the same files: one of them that cannot be read now may
  // be the one that decides, so that only data.on_error: skip goes on without it.
  absl::StatusOr<bool> HoldsDeep() const {
    const int64_t step = std::max<int64_t>(1, listing_.count() / kDeepLooks);
    bool deep = false;
    for (int64_t sample = 0; sample < listing_.count(); sample += step) {
      const auto file = ReadJobFile(Path(sample), limits::kImageFileBytes);
      if (file.ok()) deep = deep || IsDeep(*file);
      else if (data_.on_error() != "skip") return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(SampleName(sample), ": ", file.status().message()));
    }
    return deep;
  }

  static void Count(std::atomic<int64_t>* sum, std::chrono::nanoseconds time) { sum->fetch_add(time.count(), std::memory_order_relaxed); }

  std::string Path(uint64_t sample) const { return absl::StrCat(root_, "/", listing_.Name(sample)); }

  // The first images that fit in kDecodedImageBytes stay decoded, whole: a small set is decoded once. Of others only what the
  // visit needs is decoded, each time; so is what a JPEG gives at a part of its size, for a visit has one result whatever is kept.
  absl::StatusOr<Decoded> Decode(uint64_t sample, const std::function<Region(int, int)>& region) const {
    DecodeOptions options;
    options.channels = channels_;
    options.region = region;
    options.deep = deep_;
    if (data_.jpeg_scaling()) options.out_height = height_, options.out_width = width_;
    bool keep = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto known = decoded_.find(sample);
      if (known != decoded_.end()) return Within(known->second, region);
      keep = decoded_bytes_ < limits::kDecodedImageBytes;
    }
    const auto reading = Clock::System().Monotonic();
    const absl::StatusOr<std::string> file = ReadJobFile(Path(sample), limits::kImageFileBytes);
    if (!file.ok()) return ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(SampleName(sample), ": ", file.status().message()));
    bytes_.fetch_add(file->size(), std::memory_order_relaxed);
    keep = keep && (!data_.jpeg_scaling() || !IsJpeg(*file));
    if (keep) options.region = nullptr;
    const auto decoding = Clock::System().Monotonic();
    Count(&read_ns_, decoding - reading);
    absl::StatusOr<DecodedImage> image = DecodeImage(*file, options);
    Count(&decode_ns_, Clock::System().Monotonic() - decoding);
    if (!image.ok()) return Annotate(image.status(), SampleName(sample));
    const int64_t bytes = image->pixels.values_HWC.size() + 2 * image->pixels.deep_HWC.size();
    const Box box = image->box;
    auto pixels = std::make_shared<const Pixels>(std::move(image->pixels));
    if (!keep) return Decoded{pixels, box};
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      // The first that does not fit ends it: later ones are decoded in part.
      if (decoded_bytes_ + bytes > limits::kDecodedImageBytes) decoded_bytes_ = limits::kDecodedImageBytes;
      else if (decoded_.emplace(sample, pixels).second) decoded_bytes_ += bytes;
    }
    return Within(pixels, region);
  }

  static Decoded Within(std::shared_ptr<const Pixels> pixels, const std::function<Region(int, int)>& region) {
    const Region r = region(pixels->height, pixels->width);
    return {std::move(pixels), {double(r.top), double(r.left), double(r.height), double(r.width)}};
  }

  const v1::DataSpec data_;
  const std::string root_;
  const int channels_, height_, width_;
  RowFormat format_;
  bool deep_ = false;   // rows of 16 bits
  std::vector<std::string> class_names_;
  Listing listing_;
  mutable std::mutex mutex_;
  mutable std::unordered_map<uint64_t, std::shared_ptr<const Pixels>> decoded_;
  mutable int64_t decoded_bytes_ = 0;
  mutable std::atomic<int64_t> bytes_{0}, read_ns_{0}, decode_ns_{0}, resize_ns_{0};
};

Region Centred(int height, int width, int region_height, int region_width) {
  region_height = std::clamp(region_height, 1, height);
  region_width = std::clamp(region_width, 1, width);
  return {(height - region_height) / 2, (width - region_width) / 2, region_height, region_width};
}

}  // namespace

Region RandomRegion(const v1::DataSpec& data, const Visit& visit, int height, int width) {
  const bool scaled = data.crop_scale_size() == 2, shaped = data.crop_ratio_size() == 2;
  const double least_area = scaled ? data.crop_scale(0) : 0.2, most_area = scaled ? data.crop_scale(1) : 1;
  const double least_ratio = shaped ? data.crop_ratio(0) : 3.0 / 4, most_ratio = shaped ? data.crop_ratio(1) : 4.0 / 3;
  const RandomStream draws{visit.seed, Draw::kCrop, visit.epoch, visit.id};
  for (int attempt = 0; attempt < 10; ++attempt) {
    const auto draw = [&](int i) { return double{draws.Uniform(attempt * 4 + i)}; };
    const double area = double(height) * width * (least_area + (most_area - least_area) * draw(0));
    const double ratio = std::exp(std::log(least_ratio) + (std::log(most_ratio) - std::log(least_ratio)) * draw(1));
    const double w = std::round(std::sqrt(area * ratio)), h = std::round(std::sqrt(area / ratio));
    if (w < 1 || h < 1 || w > width || h > height) continue;
    return {static_cast<int>((height - h + 1) * draw(2)), static_cast<int>((width - w + 1) * draw(3)), static_cast<int>(h), static_cast<int>(w)};
  }
  const double ratio = double(width) / height;
  if (ratio < least_ratio) return Centred(height, width, static_cast<int>(std::round(width / least_ratio)), width);
  if (ratio > most_ratio) return Centred(height, width, height, static_cast<int>(std::round(height * most_ratio)));
  return {0, 0, height, width};
}

Region CentreRegion(int height, int width, int out_height, int out_width) {
  const double scale = 0.875 * std::min(double(height) / out_height, double(width) / out_width);
  return Centred(height, width, static_cast<int>(std::round(out_height * scale)), static_cast<int>(std::round(out_width * scale)));
}

absl::StatusOr<std::unique_ptr<Dataset>> OpenImageFolder(const v1::DataSpec& data, const std::string& path, const Geometry& geometry) {
  const int in_chans = geometry.spec.in_chans();
  if (geometry.dims != 2)
    return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("data.source images needs model.input_size [H, W], it has ", geometry.dims, geometry.dims == 1 ? " axis" : " axes"));
  for (const auto& [key, size] : {std::pair{"data.mean", data.mean_size()}, std::pair{"data.std", data.std_size()}})
    if (size != 0 && size != in_chans)
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat(key, " has ", size, " values, model.in_chans is ", in_chans));
  auto dataset = std::make_unique<ImageFolder>(data, path, geometry);
  RETURN_IF_ERROR(dataset->Scan());
  return dataset;
}

}  // namespace hierad
