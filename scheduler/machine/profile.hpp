#pragma once
// Figures of a machine: measured by `tandem calibrate`, or written by hand for a machine that is not at hand. The
// performance model knows nothing else about a machine.
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace tandem {

/// One figure: the median of measured samples, or a value that somebody wrote.
struct Figure {
  double value = 0.0;
  double spread = 0.0;  ///< (largest - smallest) / median of the samples, see figure_of(); 0 where there is one
  std::string source;   ///< "measured", "assumed", or where it was read
  bool known() const noexcept { return value > 0.0; }
};

/// Figures measured with this many threads; 0: not measured. For people, and for `--show`.
struct ThreadFigures {
  int threads = 0;
  double dram_copy = 0.0;               ///< bytes a second, read and written
  double dram_read = 0.0;               ///< bytes a second
  double cpu_update = 0.0;              ///< parameters a second, nothing else running
  double cpu_update_with_copies = 0.0;  ///< parameters a second, with copies both ways running
};

/// Rates are of one device where they are the device's or its link's, and of the whole machine where they
/// are the host's (DRAM, cores, CPU update): `devices` share those.
struct MachineProfile {
  std::string name;
  std::string cpu;
  std::string device_kind;  ///< "host" or "cuda"
  std::string device;
  std::string driver;
  std::string version;  ///< version of tandem that measured it

  Figure devices;  ///< devices that share the host
  Figure cores;    ///< cores of the host, for everything that runs on it
  Figure numa_nodes;
  Figure host_memory;  ///< bytes
  Figure others_busy;  ///< cores that other programs kept busy while all this was measured; may be unknown

  Figure device_memory;        ///< bytes
  Figure device_threads;       ///< cores that the device's kernels take; only a device made of the host's cores has any
  Figure matmul;               ///< FLOP/s of matrix products at the shapes of layers
  Figure products_fp8;         ///< FLOP/s of products of eight-bit factors, without quantizing; may be unknown
  Figure attention;            ///< FLOP/s of attention
  Figure device_bandwidth;     ///< bytes/s of the device's own memory, in memory-bound kernels
  Figure device_update;        ///< parameters/s of AdamW on the device, fp32 state
  Figure device_bf16_moments;  ///< parameters/s of AdamW on the device, state with bf16 moments; may be unknown
  Figure device_byte_moments;  ///< parameters/s of AdamW on the device, state with moments in a byte; may be unknown
  Figure launch;               ///< seconds that a kernel takes at least

  Figure to_device;           ///< bytes/s, pinned, this way alone
  Figure to_host;             ///< bytes/s, pinned, this way alone
  Figure both_ways;           ///< bytes/s, sum of both ways at once
  Figure pageable_to_device;  ///< bytes/s; may be unknown
  Figure pageable_to_host;
  Figure copy_latency;  ///< seconds of a copy of nothing
  Figure copy_dram;     ///< bytes of host DRAM traffic for each byte copied
  Figure copy_cores;    ///< cores that a copy at full rate occupies: 0 where DMA moves it

  Figure dram;                    ///< bytes/s, read and written together, all threads
  Figure host_stream;             ///< bytes/s of a pass over gradients on the CPU, alone
  Figure cpu_update;              ///< parameters/s of AdamW on the CPU, all update threads, alone
  Figure cpu_update_with_copies;  ///< parameters/s with copies both ways running; may be unknown
  Figure cpu_update_cores;        ///< cores that the update occupies
  Figure cpu_update_bytes;        ///< DRAM bytes that the update moves for each parameter
  Figure core_bf16_moments;       ///< parameters/s of AdamW by one core out of its cache; may be unknown
  Figure core_byte_moments;

  Figure disk;        ///< bytes/s of a file that is written, hashed and flushed; may be unknown
  Figure disk_cores;  ///< cores that writing it occupies; may be unknown

  Figure file_read;       ///< bytes/s of a file past the page cache, read alone; may be unknown
  Figure file_write;      ///< bytes/s of a file past the page cache, written alone
  Figure file_both_ways;  ///< bytes/s, sum of reading and writing at once

  Figure step_overhead;  ///< seconds of a step that no task accounts for
  Figure task_overhead;  ///< seconds between a task being ready and running

  std::vector<ThreadFigures> by_threads;

  /// Whether it is known how fast state passes through a file.
  bool knows_file() const noexcept { return file_read.known() && file_write.known() && file_both_ways.known(); }

  /// Throws UsageError that names the first figure that is missing, negative, or beyond what any machine has.
  void check() const;
};

/// Field of a profile: its name in files, its unit, and the range of credible values.
struct ProfileField {
  std::string_view section;  ///< "link"
  std::string_view key;      ///< "to_device"
  std::string_view unit;     ///< "B/s"
  std::string_view help;
  Figure MachineProfile::*figure;
  double least = 0.0;
  double most = 0.0;
  bool required = true;
};
const std::vector<ProfileField>& profile_fields();

/// Commented TOML that reads back as the same profile.
std::string profile_toml(const MachineProfile& profile);
/// Throws UsageError on unknown keys, wrong units, and all that `check` refuses.
MachineProfile parse_profile(std::string_view toml, std::string_view origin);
/// Throws InputError where the file cannot be read, and as `parse_profile`.
MachineProfile read_profile(const std::filesystem::path& file);

/// Median and spread of at least one sample. With ten or more, the spread leaves out a tenth at either end: a sample
/// that was interrupted says nothing about the others.
Figure figure_of(std::vector<double> samples);

/// Rate of a link both ways at once, from the rate measured that way and those of one way alone. Less than half of one
/// way alone means that something else ran meanwhile; the faster way's rate then stands for both.
Figure both_ways_of(const Figure& measured, const Figure& to_device, const Figure& to_host);

/// DRAM traffic in bytes for each byte that DMA copies: the part of DRAM that the CPU's update leaves over, at
/// `cpu_update_with_copies`, carries `beside` bytes/s of copies. DMA touches a byte once, but among the reads and
/// writes of cores that may cost more than a byte of theirs. Where neither slows the other there is nothing to measure
/// by: then it is one byte, or less where DRAM at its measured rate would not carry both.
Figure copy_dram_of(const MachineProfile& profile, double beside);

/// Doubts about the machine or the measurement, one line each: a link at half the expected rate, pageable copies as
/// fast as pinned ones, a spread too wide to plan with.
std::vector<std::string> doubts(const MachineProfile& profile);
/// The profile with a link that carries at most this many bytes a second each way, as the host device emulates it.
MachineProfile with_link(MachineProfile profile, double bytes_per_second);
/// The profile with a CPU that updates at most so many parameters a second.
MachineProfile with_update_rate(MachineProfile profile, double parameters_per_second);
/// The profile with updates on at most so many threads of the CPU (0: all): as fast as measured with so many, or else
/// in proportion.
MachineProfile with_update_threads(MachineProfile profile, int threads);
/// The profile with so many of its devices at work together. Devices made of the host's cores share them, where they
/// have more threads than there are cores.
MachineProfile shared_by(MachineProfile profile, int devices);
/// The profile without overhead: no latency, no launch, nothing but the work itself takes time.
MachineProfile without_overhead(MachineProfile profile);
/// Differences between the machines of two profiles (CPU, device, driver, version); "" where there are none.
std::string difference(const MachineProfile& a, const MachineProfile& b);

}  // namespace tandem
