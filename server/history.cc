#include "server/history.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/crc32c.h"
#include "base/fs.h"
#include "base/status.h"

namespace hierad {
namespace {

// A block: head, then packed steps. A step is kWords words of 8 bytes (the last only with kHasScale) and a byte of flags; a word is stored as its
// difference (integers) or its XOR (doubles) with the step's before it in the block, without the zero bytes at both ends:
// a byte that counts them, then what is left.
constexpr uint32_t kMagic = 0x314D4248;   // "HBM1"
constexpr int kIntegers = 3, kDoubles = 12, kWords = kIntegers + kDoubles;
constexpr uint8_t kSkipped = 1, kHasEval = 2, kHasPhases = 4, kHasScale = 8;
constexpr size_t kMostSteps = 1 << 16;
constexpr size_t kTailBytes = 256 << 10;   // of a file, read first where only its newest steps are asked for

struct Head {
  uint32_t magic, bytes, steps, sum;
  int64_t thinned_before;
};
static_assert(sizeof(Head) == 24);

struct Words {
  uint64_t w[kWords] = {};
  uint8_t flags = 0;
};

int WordsIn(const Words& words) { return (words.flags & kHasScale) != 0 ? kWords : kWords - 1; }

Words WordsOf(const v1::StepMetrics& m) {
  Words words;
  const int64_t integers[kIntegers] = {m.step(), m.samples(), m.time_ms()};
  const double doubles[kDoubles] = {m.epoch(), m.loss(), m.grad_norm(), m.lr(), m.step_s(), m.data_wait_s(), m.forward_s(),
                                    m.backward_s(), m.communication_s(), m.optimizer_s(), m.eval_loss(), m.loss_scale()};
  for (int i = 0; i < kIntegers; ++i) words.w[i] = uint64_t(integers[i]);
  for (int i = 0; i < kDoubles; ++i) words.w[kIntegers + i] = std::bit_cast<uint64_t>(doubles[i]);
  words.flags = uint8_t((m.skipped() ? kSkipped : 0) | (m.has_eval_loss() ? kHasEval : 0) | (m.has_forward_s() ? kHasPhases : 0) |
                        (m.has_loss_scale() ? kHasScale : 0));
  return words;
}

v1::StepMetrics MetricsOf(const Words& words) {
  const auto d = [&](int i) { return std::bit_cast<double>(words.w[kIntegers + i]); };
  v1::StepMetrics m;
  m.set_step(int64_t(words.w[0]));
  m.set_samples(int64_t(words.w[1]));
  m.set_time_ms(int64_t(words.w[2]));
  m.set_epoch(d(0));
  m.set_loss(d(1));
  m.set_grad_norm(d(2));
  m.set_lr(d(3));
  m.set_step_s(d(4));
  m.set_data_wait_s(d(5));
  if ((words.flags & kHasPhases) != 0) {
    m.set_forward_s(d(6));
    m.set_backward_s(d(7));
    m.set_communication_s(d(8));
    m.set_optimizer_s(d(9));
  }
  m.set_skipped((words.flags & kSkipped) != 0);
  if ((words.flags & kHasEval) != 0) m.set_eval_loss(d(10));
  if ((words.flags & kHasScale) != 0) m.set_loss_scale(d(11));
  return m;
}

// Integers by difference, the rest by XOR: `word` relative to `before`, and back.
uint64_t Relative(int i, uint64_t word, uint64_t before) { return i < kIntegers ? word - before : word ^ before; }
uint64_t Absolute(int i, uint64_t relative, uint64_t before) { return i < kIntegers ? relative + before : relative ^ before; }

void Pack(const Words& words, const Words& before, std::string* out) {
  out->push_back(char(words.flags));
  for (int i = 0; i < WordsIn(words); ++i) {
    uint64_t rest = Relative(i, words.w[i], before.w[i]);
    int low = 0, count = 0;
    if (rest != 0) {
      low = std::countr_zero(rest) / 8;
      rest >>= 8 * low;
      count = 8 - std::countl_zero(rest) / 8;
    }
    out->push_back(char(low << 4 | count));
    for (int b = 0; b < count; ++b) out->push_back(char(rest >> (8 * b)));
  }
}

bool Unpack(std::string_view* in, const Words& before, Words* words) {
  const auto take = [in](uint8_t* byte) {
    if (in->empty()) return false;
    *byte = uint8_t(in->front());
    in->remove_prefix(1);
    return true;
  };
  if (!take(&words->flags)) return false;
  words->w[kWords - 1] = 0;
  for (int i = 0; i < WordsIn(*words); ++i) {
    uint8_t form = 0, byte = 0;
    if (!take(&form)) return false;
    const int low = form >> 4, count = form & 15;
    if (low + count > 8) return false;
    uint64_t rest = 0;
    for (int b = 0; b < count; ++b) {
      if (!take(&byte)) return false;
      rest |= uint64_t{byte} << (8 * b);
    }
    words->w[i] = Absolute(i, low < 8 ? rest << (8 * low) : 0, before.w[i]);
  }
  return true;
}

// Adds a step, or puts it in the place of its former self and all after it.
void Put(const v1::StepMetrics& m, std::vector<v1::StepMetrics>* steps) {
  while (!steps->empty() && steps->back().step() >= m.step()) steps->pop_back();
  steps->push_back(m);
}

// The blocks of `data`, which may begin and end in the middle of one.
void ReadBlocks(std::string_view data, HistorySteps* out) {
  while (data.size() >= sizeof(Head)) {
    Head head;
    std::memcpy(&head, data.data(), sizeof head);
    const bool whole = head.magic == kMagic && head.steps <= kMostSteps && head.bytes <= data.size() - sizeof head &&
                       Crc32c(data.substr(16, 8 + size_t{head.bytes})) == head.sum;
    if (!whole) {
      data.remove_prefix(1);   // torn: to the next block
      const size_t next = data.find(std::string_view("HBM1", 4));
      if (next == std::string_view::npos) return;
      data.remove_prefix(next);
      continue;
    }
    std::string_view packed = data.substr(sizeof head, head.bytes);
    Words before, words;
    for (uint32_t i = 0; i < head.steps && Unpack(&packed, before, &words); ++i, before = words) Put(MetricsOf(words), &out->steps);
    out->thinned_before = std::max(out->thinned_before, head.thinned_before);
    data.remove_prefix(sizeof head + head.bytes);
  }
}

// The last `most` bytes of a file; NotFound: there is none.
absl::StatusOr<std::string> ReadEnd(const std::string& path, int64_t most, bool* whole) {
  UniqueFd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW));
  if (!fd) return ErrnoStatus(errno, "cannot read", path);
  struct stat info;
  if (fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "cannot read", path);
  const int64_t begin = std::max<int64_t>(0, info.st_size - most);
  *whole = begin == 0;
  std::string data(size_t(info.st_size - begin), '\0');
  size_t got = 0;
  while (got < data.size()) {
    const ssize_t n = pread(fd.get(), data.data() + got, data.size() - got, begin + int64_t(got));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, "cannot read", path);
    if (n == 0) break;
    got += size_t(n);
  }
  data.resize(got);
  return data;
}

void Select(const HistoryQuery& query, std::vector<v1::StepMetrics>* steps) {
  if (steps->empty()) return;
  const int64_t newest = steps->back().step();
  std::erase_if(*steps, [&](const v1::StepMetrics& m) {
    return m.step() < query.from || (query.to > 0 && m.step() > query.to) ||
           (query.every > 1 && m.step() % query.every != 0 && m.step() != newest);
  });
  if (query.last > 0 && int64_t(steps->size()) > query.last) steps->erase(steps->begin(), steps->end() - query.last);
}

}  // namespace

std::string HistoryBlock(const std::vector<v1::StepMetrics>& steps, int64_t thinned_before) {
  std::string packed;
  Words before;
  for (const v1::StepMetrics& m : steps) {
    const Words words = WordsOf(m);
    Pack(words, before, &packed);
    before = words;
  }
  Head head{kMagic, uint32_t(packed.size()), uint32_t(steps.size()), 0, thinned_before};
  std::string block(reinterpret_cast<const char*>(&head), sizeof head);
  block += packed;
  head.sum = Crc32c(std::string_view(block).substr(16));
  std::memcpy(block.data(), &head, sizeof head);
  return block;
}

absl::StatusOr<std::unique_ptr<History>> History::Open(std::string folder, Limits limits) {
  RETURN_IF_ERROR(MakeFolders(folder, 0700));
  std::unique_ptr<History> history(new History(std::move(folder), limits));
  history->DropOld();
  return history;
}

std::string History::PathOf(uint64_t job_id) const { return JoinPath(folder_, absl::StrCat(job_id, ".steps")); }

absl::Status History::Append(uint64_t job_id, const std::vector<v1::StepMetrics>& steps) {
  if (steps.empty()) return absl::OkStatus();
  const std::string path = PathOf(job_id), block = HistoryBlock(steps, 0);
  struct stat info {};
  {
    UniqueFd fd(open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW, 0600));
    if (!fd) return ErrnoStatus(errno, "cannot open the history", path);
    RETURN_IF_ERROR(WriteAll(fd.get(), block, path));
    if (fstat(fd.get(), &info) != 0) return ErrnoStatus(errno, "cannot look at the history", path);
  }
  written_ += int64_t(block.size());
  if (written_ > limits_.total_bytes / 16) DropOld();
  return info.st_size > limits_.job_bytes ? Thin(job_id) : absl::OkStatus();
}

// Every second step of the older half goes; what is left is one file of large blocks.
absl::Status History::Thin(uint64_t job_id) {
  bool whole = false;
  ASSIGN_OR_RETURN(const std::string data, ReadEnd(PathOf(job_id), std::numeric_limits<int64_t>::max(), &whole));
  HistorySteps all;
  ReadBlocks(data, &all);
  std::vector<v1::StepMetrics> kept;
  const size_t half = all.steps.size() / 2;
  for (size_t i = 0; i < all.steps.size(); ++i) {
    if (i >= half || i % 2 == 0) kept.push_back(std::move(all.steps[i]));
    else all.thinned_before = std::max(all.thinned_before, all.steps[i].step() + 1);
  }
  std::string file;
  constexpr size_t kBlock = 512;
  for (size_t i = 0; i < kept.size(); i += kBlock) {
    file += HistoryBlock({kept.begin() + std::ptrdiff_t(i), kept.begin() + std::ptrdiff_t(std::min(i + kBlock, kept.size()))}, all.thinned_before);
  }
  return WriteFileAtomic(PathOf(job_id), file, 0600);
}

// The oldest by the time of the last step, until the rest fits. A job at work writes all the time and is the last to go.
void History::DropOld() {
  written_ = 0;
  struct File {
    int64_t changed, bytes;
    std::string path;
  };
  std::vector<File> files;
  int64_t total = 0;
  const auto names = ListFolder(folder_);
  if (!names.ok()) return;
  for (const std::string& name : *names) {
    struct stat info;
    const std::string path = JoinPath(folder_, name);
    if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    total += info.st_size;
    files.push_back({int64_t(info.st_mtim.tv_sec) * 1'000'000'000 + info.st_mtim.tv_nsec, info.st_size, path});
  }
  std::sort(files.begin(), files.end(), [](const File& a, const File& b) { return a.changed < b.changed; });
  for (const File& file : files) {
    if (total <= limits_.total_bytes) return;
    if (unlink(file.path.c_str()) == 0) total -= file.bytes;
  }
}

absl::StatusOr<HistorySteps> History::Read(uint64_t job_id, const HistoryQuery& query) const {
  HistorySteps out;
  // Few of the newest are in the file's end, unless they are spread.
  bool whole = query.last <= 0 || query.every > 1 || query.to > 0;
  for (int64_t most = whole ? std::numeric_limits<int64_t>::max() : int64_t(kTailBytes);;) {
    absl::StatusOr<std::string> data = ReadEnd(PathOf(job_id), most, &whole);
    if (absl::IsNotFound(data.status())) return HistorySteps();
    if (!data.ok()) return data.status();
    out = HistorySteps();
    ReadBlocks(*data, &out);
    if (whole || int64_t(out.steps.size()) > query.last) break;
    most = std::numeric_limits<int64_t>::max();
  }
  Select(query, &out.steps);
  return out;
}

}  // namespace hierad
