// Every bound of the system, each with its reason. Nothing grows without one of these.
#pragma once

#include <cstdint>

namespace hierad::limits {

inline constexpr int64_t kJobYamlBytes = 64 << 10;        // a job file is written by hand
inline constexpr int kJobYamlDepth = 16;                  // deeper than any key of job.proto, shallow for the parser
inline constexpr int64_t kGrpcMessageBytes = 4 << 20;     // both directions, set explicitly (send is unlimited by default)
inline constexpr int kMetricBatch = 512;                  // metrics in one worker report
inline constexpr int kMetricsInMemory = 1024;             // newest steps kept per live job for Watch, 140 KB; the history has the rest
inline constexpr int64_t kHistoryJobBytes = 16 << 20;     // of one job's history, some 250,000 steps; then its older half is thinned
inline constexpr int64_t kHistoryBytes = int64_t{4} << 30;   // of all jobs' history; then that of the jobs longest ended goes
inline constexpr int kMetricsUnacknowledged = 65536;      // held by a worker while hierad is away; then the oldest go (they are in metrics.jsonl)
inline constexpr int kClientKeyBytes = 128;
inline constexpr int kJobNameBytes = 63;                  // fits a DNS label, a Slurm name, a file name with a suffix
inline constexpr int kMessageBytes = 2048;                // any stored sentence
inline constexpr int kListLimit = 1000;                   // jobs in one List reply
inline constexpr int kLogChunkBytes = 256 << 10;
inline constexpr int kLogPieces = 8;                      // that an agent is asked for at a time: 2 MiB fit its report
inline constexpr int kLastWordsBytes = 4096;              // end of a dead worker's log
inline constexpr int64_t kEffectiveBatch = 1 << 24;       // samples of one optimizer step; above it is a slip of the pen
inline constexpr int64_t kSampleElements = 1 << 28;       // numbers in one sample: 1 GiB in fp32, held by every reader thread
inline constexpr int kQueuedJobs = 100000;
inline constexpr int64_t kSafetensorsHeaderBytes = 100 << 20;   // the format's own limit
inline constexpr int64_t kLogFileBytes = 256 << 20;       // per rank; then the log is rotated once
inline constexpr int64_t kLogFileMost = int64_t{2} << 30; // that may be asked for instead: with what comes within a second, far below the next
inline constexpr int64_t kLogReadBytes = int64_t{4} << 30;   // a larger log no keeper has written: a file with a hole is as large as one likes
inline constexpr int kFolderDepth = 128;                  // of folders whose owner is a job's user, walked with a descriptor a level; a run has five

inline constexpr int64_t kTsFileBytes = int64_t{2} << 30; // .ts text is held in memory; larger sets belong in .npy
inline constexpr int64_t kNpyHeaderBytes = 1 << 20;       // far beyond any array of numbers
inline constexpr int64_t kArrayShards = 1'000'000;        // .npy files of one folder: their headers are in memory
inline constexpr int64_t kOpenShards = 512;               // of a folder with more, each read opens its file: 1024 descriptors is the usual limit
inline constexpr int64_t kZipMembers = 65536;             // arrays of one .npz
inline constexpr int64_t kZipDirectoryBytes = 64 << 20;   // of that many members with long names
inline constexpr int64_t kUnpackedBytes = int64_t{2} << 30;   // a compressed .npz array, held in memory: as much as .ts
inline constexpr int64_t kEdfSignals = 4096;              // the format has four digits; its header is then 1 MiB
inline constexpr int64_t kEdfRecordBytes = 1 << 30;       // one data record; far beyond the 61,440 that the format asks for
inline constexpr int64_t kEdfAnnotations = 10'000'000;    // of one recording, in memory
inline constexpr int64_t kRecordings = 1'000'000;         // files of one set
inline constexpr int64_t kFilterTaps = 1 << 20;           // of a FIR filter: 0.05 Hz at 16 kHz
inline constexpr int64_t kImageFileBytes = 256 << 20;     // one compressed image, read whole
inline constexpr int64_t kImagePixels = 64 << 20;         // of one decoded image: 200 MB per reading thread
inline constexpr int64_t kDecodedImageBytes = 256 << 20;  // decoded images kept per process: a small set is decoded once
inline constexpr int64_t kImageFiles = 100'000'000;       // of one folder: their names are in memory
inline constexpr int64_t kVisitsPerEpoch = 1 << 28;       // the order of an epoch is in memory: 2 GiB

}  // namespace hierad::limits
