#include "worker/data/loader.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <new>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/job_validate.h"
#include "base/status.h"
#include "spdlog/spdlog.h"

namespace hierad {
namespace {

constexpr int kMostLoaderThreads = 16;

constexpr size_t kAlign = 64;
constexpr int kMeasuredBatches = 4;   // before the number of readers is set by them
constexpr double kReserve = 1.3;      // readers for this many times the step's need
constexpr double kForget = 0.1;       // weight of the newest measurement
constexpr int64_t kLargeBatchBytes = int64_t{512} << 20;   // of these one, not two, is read ahead

// Memory of one micro-batch and the state of its reading.
struct Slot {
  std::byte* x_BCS = nullptr;
  std::vector<int64_t> labels_B;
  std::vector<uint64_t> ids_B;
  std::vector<uint8_t> failed_B;
  std::vector<uint64_t> visits_B;   // ids as scheduled; ids_B closes up where a sample is skipped
  int64_t micro = -1;
  int scheduled = 0;                // real rows before skipping
  int real = 0;
  int pending = 0;                  // rows still to be read
  bool ready = false;
  uint32_t epoch = 0;
  int first_error_row = 0;
  absl::Status error;
};

class ThreadedLoader : public Loader {
 public:
  ThreadedLoader(std::shared_ptr<const Dataset> dataset, const Options& options, const RunLength& length)
      : dataset_(std::move(dataset)), options_(options), length_(length), batch_(options.spec.step().batch_per_rank()),
        accumulation_(options.one_pass ? 1 : std::max(1, options.spec.step().accumulation())),
        skip_(options.spec.data().on_error() == "skip") {
    if (options_.one_pass) {
      const int64_t rows = int64_t{options_.world_size} * batch_;
      end_ = (dataset_->count() + rows - 1) / rows;
    } else {
      next_ = options_.first_step * accumulation_;
      end_ = length_.total_steps * accumulation_;
    }
    requested_ = reading_ = next_;
    const RowFormat& rows = dataset_->row_format();
    row_bytes_ = options_.spec.model().in_chans() * SizeOf(rows.type);
    for (int axis : options_.spec.model().input_size()) row_bytes_ *= axis;
    if (rows.rules.synthetic > 0) row_bytes_ = 0;
  }

  ~ThreadedLoader() override {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
    for (Slot& slot : slots_) Release(slot.x_BCS);
  }

  absl::Status Start() {
    const int64_t bytes = batch_ * row_bytes_;
    ahead_ = bytes > kLargeBatchBytes ? 1 : 2;
    slots_.resize(accumulation_ + 1 + ahead_);
    for (Slot& slot : slots_) {
      slot.x_BCS = static_cast<std::byte*>(Allocate(std::max<int64_t>(1, bytes)));
      if (!slot.x_BCS) return ErrorOf(v1::REASON_HOST_OOM, absl::StrCat("no host memory for ", slots_.size(), " input batches of ", bytes, " bytes; lower step.batch_per_rank"));
      slot.labels_B.resize(batch_);
      slot.ids_B.resize(batch_);
      slot.failed_B.resize(batch_);
      slot.visits_B.resize(batch_);
    }
    const int threads = std::max(1, options_.threads);
    active_ = threads;
    in_hand_.assign(threads, InHand{});
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this, i] { ReadRows(i); });
    return absl::OkStatus();
  }

  absl::StatusOr<MicroBatch> Next() override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (next_ >= end_) return absl::OutOfRangeError(absl::StrCat("the ", options_.one_pass ? "data set" : "run", " ends after ", end_, " micro-batches"));
    requested_ = next_;   // frees the batch before the last `accumulation` ones
    const auto called = Clock::System().Monotonic();
    SetReaders(called);
    work_.notify_all();
    Slot& slot = slots_[next_ % slots_.size()];
    const auto is_ready = [&] { return slot.ready && slot.micro == next_; };
    if (!is_ready()) {
      waiting_ = true;
      ready_.wait(lock, is_ready);
      waiting_ = false;
      wait_s_ += Seconds(Clock::System().Monotonic() - called);
    }
    returned_ = Clock::System().Monotonic();
    RETURN_IF_ERROR(slot.error);   // again at every further call
    ++next_;
    return MicroBatch{slot.x_BCS, slot.labels_B.data(), slot.ids_B.data(), slot.real, slot.epoch};
  }

  double data_wait_s() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return wait_s_;
  }
  v1::DataCounters counters() const override {
    v1::DataCounters counters;
    counters.set_bytes(dataset_->bytes_read());
    const std::lock_guard<std::mutex> lock(mutex_);
    counters.set_wait_s(wait_s_);
    counters.set_samples(rows_read_);
    counters.set_threads(active_);
    counters.set_slowest_s(slowest_s_);
    counters.set_skipped_samples(static_cast<int64_t>(unreadable_.size()));
    if (rows_read_ > 0) counters.set_slowest(dataset_->SampleName(slowest_));
    return counters;
  }
  std::string WaitingIn() const override {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!waiting_) return "";
    for (const InHand& row : in_hand_)
      if (row.micro == next_) return absl::StrCat("reading ", dataset_->SampleName(row.sample));
    return "reading";
  }

 private:
  struct InHand {
    int64_t micro = -1;
    uint64_t sample = 0;
  };

  static double Seconds(std::chrono::nanoseconds time) { return std::chrono::duration<double>(time).count(); }

  // Under the mutex, when the next batch is asked for: as many readers as read a batch in the time that one lasts.
  void SetReaders(std::chrono::nanoseconds now) {
    if (returned_.count() == 0) return;
    const double busy = Seconds(now - returned_);
    busy_s_ = batches_ == 0 ? busy : busy_s_ + kForget * (busy - busy_s_);
    if (++batches_ < kMeasuredBatches) return;
    const double need = busy_s_ > 0 ? kReserve * row_s_ * static_cast<double>(batch_) / busy_s_ : 1e9;
    active_ = static_cast<int>(std::clamp(std::ceil(need), 1.0, static_cast<double>(threads_.size())));
  }

  // Under the mutex.
  void NoteRead(uint64_t sample, double seconds) {
    row_s_ = rows_read_ == 0 ? seconds : row_s_ + kForget * (seconds - row_s_);
    if (rows_read_++ > 0 && seconds <= slowest_s_) return;
    slowest_s_ = seconds;
    slowest_ = sample;
  }

  void* Allocate(size_t bytes) const {
    if (options_.allocate) return options_.allocate(bytes);
    return ::operator new(bytes, std::align_val_t{kAlign}, std::nothrow);
  }
  void Release(void* memory) const {
    if (!memory) return;
    if (options_.allocate) {
      if (options_.release) options_.release(memory);
    } else {
      ::operator delete(memory, std::align_val_t{kAlign});
    }
  }

  // Under the mutex: which visits the micro-batch `reading_` holds.
  void Schedule(Slot* slot) {
    slot->micro = reading_;
    slot->ready = false;
    slot->error = absl::OkStatus();
    std::fill(slot->failed_B.begin(), slot->failed_B.end(), 0);
    std::fill(slot->visits_B.begin(), slot->visits_B.end(), 0);
    slot->pending = batch_;
    const int64_t world = options_.world_size;
    int64_t begin, end;   // positions in the epoch's order: of this slice's first row, and past the last of the step
    const std::vector<uint64_t>* order = nullptr;
    if (options_.one_pass) {
      slot->epoch = 0;
      begin = (reading_ * world + options_.rank) * batch_;
      end = dataset_->count();
    } else {
      const int64_t step = reading_ / accumulation_, step_in_epoch = step % length_.steps_per_epoch;
      slot->epoch = static_cast<uint32_t>(step / length_.steps_per_epoch);
      const int64_t step_begin = step_in_epoch * length_.effective_batch;
      begin = step_begin + ((reading_ % accumulation_) * world + options_.rank) * batch_;
      end = step_begin + length_.RealSamples(step);
      if (!order_ready_ || order_epoch_ != slot->epoch) {
        order_ = EpochOrder(options_.spec.seed(), slot->epoch, length_.visits_per_epoch);
        order_epoch_ = slot->epoch;
        order_ready_ = true;
      }
      order = &order_;
    }
    slot->scheduled = static_cast<int>(std::clamp<int64_t>(end - begin, 0, batch_));
    for (int b = 0; b < slot->scheduled; ++b) slot->visits_B[b] = order ? (*order)[begin + b] : static_cast<uint64_t>(begin + b);
  }

  void ReadRows(int thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stop_ || (thread < active_ && reading_ < end_ && reading_ <= requested_ + ahead_); });
      if (stop_) return;
      Slot& slot = slots_[reading_ % slots_.size()];
      if (row_ == 0) Schedule(&slot);
      const int row = row_++;
      if (row_ == batch_) {
        row_ = 0;
        ++reading_;
      }
      const uint64_t id = slot.visits_B[row], sample = id % dataset_->count();
      absl::Status status;
      if (row >= slot.scheduled) {
        lock.unlock();
        Clear(&slot, row);
        lock.lock();
      } else if (!unreadable_.contains(sample)) {
        in_hand_[thread] = {slot.micro, sample};
        lock.unlock();
        const auto begin = Clock::System().Monotonic();
        status = ReadRow(&slot, row, Visit{sample, id, options_.spec.seed(), slot.epoch, !options_.one_pass});
        const double seconds = Seconds(Clock::System().Monotonic() - begin);
        lock.lock();
        NoteRead(sample, seconds);
        in_hand_[thread] = {};
        if (!status.ok()) NoteError(&slot, row, sample, status);
      } else {
        slot.failed_B[row] = 1;
      }
      if (--slot.pending == 0) {
        lock.unlock();
        CloseUp(&slot);
        lock.lock();
        slot.ready = true;
        ready_.notify_all();
      }
    }
  }

  absl::Status ReadRow(Slot* slot, int row, const Visit& visit) const {
    try {
      return dataset_->ReadRow(visit, slot->x_BCS + row * row_bytes_);
    } catch (const std::bad_alloc&) {
      return ErrorOf(v1::REASON_HOST_OOM, absl::StrCat("no host memory to read ", dataset_->SampleName(visit.sample)));
    }
  }

  // Under the mutex.
  void NoteError(Slot* slot, int row, uint64_t sample, absl::Status status) {
    slot->failed_B[row] = 1;
    if (skip_ && ReasonOf(status) == v1::REASON_DATA_ERROR) {
      if (!unreadable_.insert(sample).second) return;
      spdlog::warn("sample skipped: {}", std::string(status.message()));
      const int64_t limit = options_.spec.data().max_skipped();
      if (static_cast<int64_t>(unreadable_.size()) <= limit) return;
      status = ErrorOf(v1::REASON_DATA_ERROR, absl::StrCat(unreadable_.size(), " samples could not be read, data.max_skipped allows ", limit, "; the last: ", std::string(status.message())));
    }
    if (slot->error.ok() || row < slot->first_error_row) {   // the first in order, whichever thread was first in time
      slot->error = status;
      slot->first_error_row = row;
    }
  }

  void Clear(Slot* slot, int row) const { std::memset(slot->x_BCS + row * row_bytes_, 0, row_bytes_); }

  // Real rows to the front in their order, zeros behind them. Only this thread touches the slot now.
  void CloseUp(Slot* slot) const {
    int real = 0;
    for (int row = 0; row < slot->scheduled; ++row) {
      if (slot->failed_B[row]) continue;
      if (real != row) std::memcpy(slot->x_BCS + real * row_bytes_, slot->x_BCS + row * row_bytes_, row_bytes_);
      slot->ids_B[real] = slot->visits_B[row];
      slot->labels_B[real] = dataset_->label(slot->visits_B[row] % dataset_->count());
      ++real;
    }
    for (int row = real; row < slot->scheduled; ++row) Clear(slot, row);
    std::fill(slot->ids_B.begin() + real, slot->ids_B.end(), 0);
    std::fill(slot->labels_B.begin() + real, slot->labels_B.end(), -1);
    slot->real = real;
  }

  const std::shared_ptr<const Dataset> dataset_;
  const Options options_;
  const RunLength length_;
  const int64_t batch_;
  const int64_t accumulation_;
  const bool skip_;
  int64_t row_bytes_ = 0, end_ = 0, ahead_ = 2;
  std::vector<Slot> slots_;   // micro-batch m lives in slots_[m % size]

  mutable std::mutex mutex_;
  std::condition_variable work_, ready_;
  int64_t next_ = 0;        // micro-batch that Next returns next
  int64_t requested_ = 0;   // micro-batch last asked for: those up to ahead_ beyond it may be read
  int64_t reading_ = 0;     // micro-batch whose rows are being handed out
  int row_ = 0;             // its next row
  bool stop_ = false, waiting_ = false;
  double wait_s_ = 0;
  int active_ = 1;          // threads below it read
  int64_t batches_ = 0, rows_read_ = 0;
  double busy_s_ = 0, row_s_ = 0;   // between two calls of Next, without its wait; to read a row: means that forget
  std::chrono::nanoseconds returned_{0};
  double slowest_s_ = 0;
  uint64_t slowest_ = 0;
  std::vector<uint64_t> order_;   // of order_epoch_
  uint32_t order_epoch_ = 0;
  bool order_ready_ = false;
  std::set<uint64_t> unreadable_;   // at most max_skipped + threads
  std::vector<InHand> in_hand_;
  std::vector<std::thread> threads_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Loader>> MakeLoader(std::shared_ptr<const Dataset> dataset, const Loader::Options& options) {
  if (options.rank < 0 || options.rank >= options.world_size)
    return absl::InternalError(absl::StrCat("loader of rank ", options.rank, " of ", options.world_size));
  RunLength length{};
  if (!options.one_pass) {
    if (options.spec.resources().ranks() != options.world_size)
      return absl::InternalError(absl::StrCat("loader for ", options.world_size, " ranks, resources.ranks is ", options.spec.resources().ranks()));
    ASSIGN_OR_RETURN(length, RunLength::For(options.spec, dataset->count()));
    if (options.first_step < 0 || options.first_step > length.total_steps)
      return ErrorOf(v1::REASON_USER_ERROR, absl::StrCat("step ", options.first_step, " is beyond the run's ", length.total_steps, " steps"));
  } else if (dataset->count() < 1 || options.spec.step().batch_per_rank() < 1) {
    return ErrorOf(v1::REASON_DATA_ERROR, "the data set holds 0 samples; at least 1 is needed");
  }
  auto loader = std::make_unique<ThreadedLoader>(std::move(dataset), options, length);
  RETURN_IF_ERROR(loader->Start());
  return loader;
}

int LoaderThreads(const v1::JobSpec& spec, bool cuda, int cores) {
  if (spec.data().has_workers()) return spec.data().workers();
  return cuda ? std::clamp(cores, 1, kMostLoaderThreads) : 1;
}

}  // namespace hierad
