#include "worker/comm/shared_segment.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <linux/futex.h>
#include <new>
#include <random>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/clock.h"
#include "base/status.h"

namespace hierad {
namespace {

constexpr uint64_t kMagic = 0x31304d48535248ull;
constexpr int64_t kPage = 4096;
constexpr int64_t kMaxChunkBytes = 4 << 20;    // two sets of it per rank stay within most caches and any /dev/shm
constexpr int64_t kMinChunkBytes = 64 << 10;
constexpr int kSpins = 2000;                   // some 40 us
constexpr int kYields = 20;
constexpr std::chrono::milliseconds kBeatEvery{200};
constexpr int64_t kNapNs = 50'000'000;         // between two looks at the peers
constexpr size_t kActivityWords = 16;
constexpr uint32_t kJoined = 1, kLeft = 2;

void FutexWait(std::atomic<uint32_t>* word, uint32_t value, int64_t nanoseconds) {
  timespec limit{nanoseconds / 1'000'000'000, nanoseconds % 1'000'000'000};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, value, &limit, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

struct Blob {
  long pid = 0;
  int fd = -1;
  unsigned long long token = 0;
};

bool ParseBlob(const std::string& text, Blob* blob) {
  int used = 0;
  return std::sscanf(text.c_str(), "hierad-shm-1:%ld:%d:%llx%n", &blob->pid, &blob->fd, &blob->token, &used) == 3 &&
         size_t(used) == text.size();
}

double Seconds(std::chrono::nanoseconds t) { return std::chrono::duration<double>(t).count(); }

}  // namespace

struct SharedSegment::Header {
  uint64_t magic;
  uint64_t token;
  int64_t size;
  int64_t chunk_bytes;
  alignas(128) std::atomic<uint32_t> bell;       // rung by the rank that completes a Sync
  alignas(128) std::atomic<uint32_t> sleepers;
};

struct SharedSegment::RankBlock {
  alignas(128) std::atomic<uint64_t> arrived;
  alignas(128) std::atomic<uint64_t> beat;
  std::atomic<uint32_t> state;
  std::atomic<int32_t> pid;
  std::atomic<uint64_t> tag[2];
  std::atomic<uint64_t> activity[kActivityWords];
};

absl::StatusOr<std::string> SharedSegment::Make(const CommunicatorOptions& options, const std::string& unique_name,
                                                int64_t max_bytes) {
  static_assert(sizeof(Header) <= size_t(kPage));
  static_assert(std::atomic<uint64_t>::is_always_lock_free);
  const int64_t chunk = std::clamp((max_bytes + kPage - 1) / kPage * kPage, kMinChunkBytes, kMaxChunkBytes);
  const int64_t blocks = (int64_t(sizeof(RankBlock)) * options.size + kPage - 1) / kPage * kPage;
  const int64_t bytes = kPage + blocks + 2 * options.size * chunk;
  UniqueFd fd(memfd_create(unique_name.c_str(), MFD_CLOEXEC));
  if (!fd) return ErrnoStatus(errno, "cannot make the ranks' shared memory", unique_name);
  // Now rather than as a SIGBUS in the middle of a step.
  if (const int error = posix_fallocate(fd.get(), 0, bytes); error != 0) {
    return ErrorOf(v1::REASON_HOST_OOM,
                   absl::StrCat("shared memory of ", bytes, " bytes for ", options.size, " CPU ranks: ", strerror(error),
                                "; free memory on the node, or raise the job's memory limit"));
  }
  void* memory = mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return ErrnoStatus(errno, "cannot map the ranks' shared memory", unique_name);
  auto* header = new (memory) Header{};
  std::random_device random;
  header->token = (uint64_t(random()) << 32) | random();
  header->size = options.size;
  header->chunk_bytes = chunk;
  header->magic = kMagic;
  char blob[96];
  std::snprintf(blob, sizeof blob, "hierad-shm-1:%ld:%d:%llx", long(getpid()), fd.get(),
                static_cast<unsigned long long>(header->token));
  munmap(memory, kPage);
  fd.release();
  return std::string(blob);
}

absl::StatusOr<std::unique_ptr<SharedSegment>> SharedSegment::Join(const CommunicatorOptions& options,
                                                                   const std::string& rendezvous) {
  Blob blob;
  if (!ParseBlob(rendezvous, &blob)) {
    return absl::InternalError("the rendezvous of the CPU ranks is not one of this version; all ranks must run the same hiera-worker");
  }
  // The process that made the segment keeps its one descriptor: closing any other would drop its record lock.
  UniqueFd fd(blob.pid == getpid() ? blob.fd
                                   : open(absl::StrCat("/proc/", blob.pid, "/fd/", blob.fd).c_str(), O_RDWR | O_CLOEXEC));
  if (!fd) {
    return ErrorOf(errno == EACCES || errno == EPERM ? v1::REASON_INTERNAL : v1::REASON_PEER_LOST,
                   absl::StrCat("rank ", options.rank, " cannot join the shared memory of rank 0 (pid ", blob.pid, "): ",
                                strerror(errno)));
  }
  struct stat info{};
  if (fstat(fd.get(), &info) != 0 || info.st_size < kPage) {
    return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat("rank 0 (pid ", blob.pid, ") is gone: its shared memory is not there"));
  }
  void* memory = mmap(nullptr, size_t(info.st_size), PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
  if (memory == MAP_FAILED) return ErrnoStatus(errno, "cannot map the ranks' shared memory", rendezvous);
  std::unique_ptr<SharedSegment> segment(new SharedSegment(options, std::move(fd), memory, size_t(info.st_size)));
  if (segment->header_->magic != kMagic || segment->header_->token != blob.token) {
    return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat("rank 0 (pid ", blob.pid, ") is gone: its shared memory is not there"));
  }
  if (segment->header_->size != options.size || options.rank < 0 || options.rank >= options.size) {
    return absl::InternalError(absl::StrCat("rank ", options.rank, " of ", options.size, " joined a segment for ",
                                            segment->header_->size, " ranks"));
  }
  segment->chunk_bytes_ = segment->header_->chunk_bytes;
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = options.rank;
  lock.l_len = 1;
  if (fcntl(segment->fd_.get(), F_SETLK, &lock) != 0) {
    return absl::InternalError(absl::StrCat("rank ", options.rank, " has joined twice: its place is held by another process"));
  }
  RankBlock& own = segment->Block(options.rank);
  own.pid = getpid();
  own.state = kJoined;
  segment->beat_ = std::thread([s = segment.get()] { s->Beat(); });
  RETURN_IF_ERROR(segment->Sync([] { return std::string("rendezvous"); }));
  return segment;
}

SharedSegment::SharedSegment(const CommunicatorOptions& options, UniqueFd fd, void* memory, size_t bytes)
    : options_(options), fd_(std::move(fd)), memory_(memory), bytes_(bytes), header_(static_cast<Header*>(memory)),
      signs_(new Sign[size_t(options.size)]) {}

SharedSegment::~SharedSegment() {
  if (beat_.joinable()) {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    stop_changed_.notify_all();
    beat_.join();
    Block(options_.rank).state = kLeft;
    header_->bell.fetch_add(1);
    FutexWakeAll(&header_->bell);
  }
  munmap(memory_, bytes_);
}

SharedSegment::RankBlock& SharedSegment::Block(int rank) const {
  return reinterpret_cast<RankBlock*>(static_cast<char*>(memory_) + kPage)[rank];
}

char* SharedSegment::Slot(int set, int rank) const {
  const int64_t blocks = (int64_t(sizeof(RankBlock)) * options_.size + kPage - 1) / kPage * kPage;
  return static_cast<char*>(memory_) + kPage + blocks + (int64_t(set) * options_.size + rank) * chunk_bytes_;
}

void SharedSegment::Publish(uint64_t collective, uint64_t tag) {
  Block(options_.rank).tag[collective & 1].store(tag, std::memory_order_relaxed);
}

uint64_t SharedSegment::Published(uint64_t collective, int rank) const {
  return Block(rank).tag[collective & 1].load(std::memory_order_relaxed);
}

void SharedSegment::SetActivity(const std::string& activity) {
  char text[kActivityWords * 8] = {};
  std::memcpy(text, activity.data(), std::min(activity.size(), sizeof text - 1));
  for (size_t i = 0; i < kActivityWords; ++i) {
    uint64_t word;
    std::memcpy(&word, text + 8 * i, 8);
    Block(options_.rank).activity[i].store(word, std::memory_order_relaxed);
  }
}

void SharedSegment::Beat() {
  std::unique_lock lock(mutex_);
  while (!stop_changed_.wait_for(lock, kBeatEvery, [&] { return stop_; })) Block(options_.rank).beat.fetch_add(1);
}

bool SharedSegment::AllArrived(uint64_t target) const {
  for (int r = 0; r < options_.size; ++r) {
    if (Block(r).arrived.load() < target) return false;
  }
  return true;
}

absl::Status SharedSegment::Sync(const std::function<std::string()>& what) {
  const uint64_t target = ++arrivals_;
  Block(options_.rank).arrived.store(target);
  // Of the ranks that arrive together at least the last one sees all the others: it wakes the sleepers.
  if (AllArrived(target)) {
    header_->bell.fetch_add(1);
    if (header_->sleepers.load() > 0) FutexWakeAll(&header_->bell);
    return absl::OkStatus();
  }
  for (int i = 0; i < kSpins; ++i) {
    if (AllArrived(target)) return absl::OkStatus();
    Pause();
  }
  for (int i = 0; i < kYields; ++i) {
    if (AllArrived(target)) return absl::OkStatus();
    sched_yield();
  }
  return SleepUntilArrived(target, what);
}

absl::Status SharedSegment::SleepUntilArrived(uint64_t target, const std::function<std::string()>& what) {
  const Clock& clock = Clock::System();
  const auto begin = clock.Monotonic();
  for (int r = 0; r < options_.size; ++r) signs_[r] = {Block(r).beat.load(), begin};
  auto looked = begin;
  while (true) {
    header_->sleepers.fetch_add(1);
    const uint32_t bell = header_->bell.load();
    if (!AllArrived(target)) FutexWait(&header_->bell, bell, kNapNs);
    header_->sleepers.fetch_sub(1);
    if (AllArrived(target)) return absl::OkStatus();
    if (options_.abandon != nullptr && options_.abandon->load()) {
      return ErrorOf(v1::REASON_CANCELLED, absl::StrCat("rank ", options_.rank, " gave up waiting in ", what()));
    }
    const auto now = clock.Monotonic();
    if (now - looked < std::chrono::nanoseconds(kNapNs / 2)) continue;
    looked = now;
    RETURN_IF_ERROR(CheckMissing(target, now - begin, what));
  }
}

absl::Status SharedSegment::CheckMissing(uint64_t target, std::chrono::nanoseconds waited,
                                         const std::function<std::string()>& what) {
  const auto now = Clock::System().Monotonic();
  std::vector<std::string> lost, waiting;
  for (int r = 0; r < options_.size; ++r) {
    RankBlock& block = Block(r);
    const uint32_t state = block.state.load();
    const bool alive = state != kJoined || Alive(r);
    if (block.arrived.load() >= target) continue;   // read after its life: it may have arrived and then left
    if (const uint64_t beat = block.beat.load(); beat != signs_[r].beat) signs_[r] = {beat, now};
    const auto silent = now - signs_[r].at;
    if (state == kLeft) {
      lost.push_back(absl::StrCat(DescribeRank(r), " has left"));
    } else if (!alive) {
      lost.push_back(absl::StrCat(DescribeRank(r), " has exited"));
    } else if (state != kJoined) {
      if (waited >= options_.join_timeout) lost.push_back(absl::StrCat("rank ", r, " has not joined within ", Seconds(options_.join_timeout), " s"));
    } else if (silent >= options_.timeout) {
      lost.push_back(absl::StrCat(DescribeRank(r), " has shown no sign of life for ", int64_t(Seconds(silent)), " s"));
    } else if (waited >= options_.busy_timeout) {
      lost.push_back(absl::StrCat(DescribeRank(r), " is alive but has not come for ", int64_t(Seconds(waited)), " s"));
    }
  }
  if (lost.empty()) return absl::OkStatus();
  return ErrorOf(v1::REASON_PEER_LOST, absl::StrCat("rank ", options_.rank, " waiting in ", what(), ": ", absl::StrJoin(lost, "; ")));
}

std::string SharedSegment::DescribeRank(int rank) const {
  char text[kActivityWords * 8 + 1] = {};
  for (size_t i = 0; i < kActivityWords; ++i) {
    const uint64_t word = Block(rank).activity[i].load(std::memory_order_relaxed);
    std::memcpy(text + 8 * i, &word, 8);
  }
  return absl::StrCat("rank ", rank, " (pid ", Block(rank).pid.load(), text[0] != 0 ? ", at " : "", text, ")");
}

bool SharedSegment::Alive(int rank) const {
  if (rank == options_.rank) return true;
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(fd_.get(), F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

}  // namespace hierad
