// Collects the facts about this machine for `splice doctor`; changes nothing. doctor_checks.h judges them.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace spl::cli {

struct DoctorOptions {
  std::string backend = "auto";            // "cuda": GPUs are required; "cpu": they are not checked
  std::string model_dir;                   // empty: not checked
  std::string data_dir;                    // folder of the chunk store; empty: not checked
  uint64_t store_disk_bytes = 8ull << 30;  // bytes that the store needs on disk
  std::optional<uint64_t> kv_bytes;        // size of each of the two page pools; nullopt: auto
  std::vector<std::string> listen = {"127.0.0.1:8000", "127.0.0.1:8001"};  // HOST:PORT of the programs' servers
  std::string kv_listen_host = "127.0.0.1";  // address on which the KV transport is tested
  std::string router;                        // URL of a running router, to compare clocks; empty: they are not compared
  std::string api_key;                       // API key of an operator, for `router`
  std::string ca_file;                       // CAs of the router's certificate; empty: the system's
};

// In all facts: `error` empty: there was none.
struct LibraryFact {
  std::string name;
  std::string needed_for;
  std::string error;  // message of the loader: it cannot be opened
};

struct GpuFact {
  int index = 0;
  std::string name;
  uint64_t total_bytes = 0, free_bytes = 0;
  int compute_major = 0, compute_minor = 0;
  std::optional<bool> ecc, persistence;  // nullopt: the driver does not tell
};

struct NicFact {
  std::string name;
  bool up = false;
  std::optional<int64_t> megabits_per_s;  // nullopt: it has no line, like virtual ones
};

// A test transfer of the KV transport, from this process to itself.
struct TransferFact {
  std::string asked;    // "auto", "tcp"
  std::string carrier;  // the carrier that the transport chose
  double bytes_per_s = 0;
  std::string error;
};

struct ClockFact {
  std::string program;
  std::string error;                 // it did not answer, or does not tell its time
  double offset_s = 0, bound_s = 0;  // ahead of this machine by offset_s ± bound_s
};

struct PortFact {
  std::string address;
  std::string error;  // a server cannot listen on it
};

struct DoctorFacts {
  // The build.
  int build_cuda_major = 0;         // 0: without GPUs
  std::string build_architectures;  // in CMake's form, "80-real,90a-real"

  // The driver. Versions are CUDA's: 1000 * major + 10 * minor.
  std::string driver_version;  // empty: none
  int driver_cuda_version = 0;
  std::vector<LibraryFact> libraries;
  std::vector<GpuFact> gpus;

  std::string cpu_isa;  // CpuIsaName
  bool cpu_bf16 = false;
  int num_cpus = 0;

  std::vector<NicFact> nics;
  std::vector<std::string> rdma_devices;
  std::map<std::string, std::string> ucx_environment;
  double memcpy_bytes_per_s = 0;
  std::vector<TransferFact> transfers;

  std::vector<ClockFact> clocks;

  uint64_t open_files = 0;  // soft limit; UINT64_MAX: none
  uint64_t open_files_hard = 0;
  uint64_t locked_bytes = 0;
  std::string transparent_huge_pages;      // "always", "madvise", "never"; empty: the kernel does not tell
  std::optional<uint64_t> shm_free_bytes;  // free space of /dev/shm; nullopt: there is none
  uint64_t memory_available_bytes = 0;     // kernels::ReadHostMemory

  std::vector<PortFact> ports;

  struct Model {
    std::string dir;
    std::string error;
    uint64_t weight_bytes = 0;
    std::string weights;  // their type, ModelConfig::weights_name
    bool has_tokenizer = false;
    std::string tokenizer_error;
    int64_t max_context = 0;      // tokens
    uint64_t sequence_bytes = 0;  // KV of a sequence of that length
  };
  std::optional<Model> model;

  struct Disk {
    std::string dir;  // the data folder, or its nearest parent that exists
    std::string error;
    uint64_t free_bytes = 0;
  };
  std::optional<Disk> disk;
};

// Opens no GPU context and writes no file. Cost: a second or two, mostly for moving bytes.
DoctorFacts CollectDoctorFacts(const DoctorOptions& options);

}  // namespace spl::cli
