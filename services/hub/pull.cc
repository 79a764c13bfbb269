#include "services/hub/pull.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <set>
#include <thread>

#include "services/base/byte_size.h"
#include "services/base/status.h"
#include "services/hub/file_download.h"
#include "services/hub/folder_lock.h"
#include "services/hub/model_folder.h"

namespace spl::hub {
namespace {

namespace fs = std::filesystem;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLook{200};  // between two looks at progress and stop
constexpr int kListTries = 3;

double SecondsSince(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

struct Download {
  HubFile file;
  std::atomic<uint64_t> done{0};
  std::atomic<bool> complete{false};
};

// One pull. The calling thread looks after progress; each connection to the hub has a thread.
class Pull {
 public:
  explicit Pull(const PullOptions& options)
      : options_(options), staging_(options.dir + "/" + kPullFolder), start_(Clock::now()) {}

  absl::StatusOr<PullResult> Run() {
    SPLICE_RETURN_IF_ERROR(WithHub([&](HubClient& hub) { return List(hub); }));
    if (options_.is_elsewhere && options_.is_elsewhere(listing_.commit)) return Result({});
    std::error_code error;
    fs::create_directories(staging_, error);
    if (error) return Errorf(absl::StatusCode::kFailedPrecondition, "{}: {}", staging_, error.message());
    SPLICE_ASSIGN_OR_RETURN(const auto lock, FolderLock::Take(staging_ + "/lock", options_.lock_timeout, [&] {
                              Show(PullProgress::Stage::kWaiting);
                              std::this_thread::sleep_for(kLook);
                              return !Stopped();
                            }));
    const auto record = ReadPullRecord(options_.dir);
    if (record.ok() && record->commit == listing_.commit && record->name.repository == options_.name.repository &&
        HasFilesOf(options_.dir, *record))
      return Result(record->files);
    SPLICE_RETURN_IF_ERROR(WithHub([&](HubClient& hub) { return Choose(hub); }));
    Show(PullProgress::Stage::kChecking);
    SPLICE_RETURN_IF_ERROR(FindMissing(record.ok() ? *record : PullRecord()));
    SPLICE_RETURN_IF_ERROR(CheckRoom());
    SPLICE_RETURN_IF_ERROR(FetchAll());
    SPLICE_RETURN_IF_ERROR(MoveInPlace(record.ok() ? *record : PullRecord()));
    Show(PullProgress::Stage::kDone);
    return Result(files_);
  }

 private:
  bool Stopped() const { return options_.stopped && options_.stopped(); }

  PullResult Result(const std::vector<HubFile>& files) const {
    PullResult result{.commit = listing_.commit, .files = files, .seconds = SecondsSince(start_)};
    for (const Download& download : downloads_) result.fetched_bytes += download.file.size;
    return result;
  }

  void Show(PullProgress::Stage stage) const {
    if (!options_.on_progress) return;
    PullProgress progress{.stage = stage};
    for (const Download& download : downloads_) {
      const PullProgress::File& file = progress.files.emplace_back(
          PullProgress::File{download.file.name, download.file.size, download.done, download.complete});
      progress.size += file.size;
      progress.done += file.done;
    }
    if (fetch_start_ != Clock::time_point()) progress.seconds = SecondsSince(fetch_start_);
    options_.on_progress(progress);
  }

  // Runs `work` with a client on a thread of its own, while this one looks for a stop.
  template <typename Work>
  absl::Status WithHub(const Work& work) {
    return Together(1, [&](HubClient& hub) { return work(hub); });
  }

  // The same on `count` threads. The first error stops the others and is returned.
  absl::Status Together(int count, const std::function<absl::Status(HubClient&)>& work) {
    std::vector<std::unique_ptr<HubClient>> clients;
    for (int i = 0; i < count; ++i) {
      SPLICE_ASSIGN_OR_RETURN(clients.emplace_back(), HubClient::Create(options_.hub));
    }
    std::mutex mutex;  // guards running and first
    std::condition_variable ended;
    int running = count;
    absl::Status first;
    std::vector<std::thread> threads;
    for (const auto& client : clients) {
      threads.emplace_back([&, hub = client.get()] {
        const absl::Status status = work(*hub);
        std::lock_guard lock(mutex);
        if (first.ok()) first = status;
        --running;
        ended.notify_all();
      });
    }
    std::unique_lock lock(mutex);
    for (bool cancelled = false; running > 0;) {
      ended.wait_for(lock, kLook);
      if (Stopped() && first.ok()) first = absl::CancelledError("stopped");
      if (!first.ok() && !std::exchange(cancelled, true)) {
        for (const auto& client : clients) client->Cancel();
      }
      lock.unlock();
      Show(stage_);
      lock.lock();
    }
    lock.unlock();
    for (std::thread& thread : threads) thread.join();
    return first;
  }

  absl::Status List(HubClient& hub) {
    auto pause = options_.first_pause;
    for (int tries = 1;; ++tries, pause *= 2) {
      auto listing = hub.List(options_.name);
      if (listing.ok()) return listing_ = *std::move(listing), absl::OkStatus();
      const bool again = listing.status().code() == absl::StatusCode::kUnavailable ||
                         listing.status().code() == absl::StatusCode::kDeadlineExceeded;
      if (!again || tries == kListTries) return listing.status();
      if (!hub.Pause(pause)) return absl::CancelledError("stopped");
    }
  }

  DownloadOptions Downloads() const {
    return {.repository = options_.name.repository,
            .commit = listing_.commit,
            .folder = staging_,
            .max_tries = options_.max_tries,
            .first_pause = options_.first_pause};
  }

  // The index says which files hold the weights.
  absl::Status Choose(HubClient& hub) {
    std::string index;
    const auto found = std::find_if(listing_.files.begin(), listing_.files.end(),
                                    [](const HubFile& file) { return file.name == kIndexFile; });
    if (found != listing_.files.end()) {
      std::atomic<uint64_t> done{0};
      SPLICE_RETURN_IF_ERROR(DownloadFile(hub, Downloads(), *found, done));
      std::ifstream in(staging_ + "/" + StagedName(*found), std::ios::binary);
      index.assign(std::istreambuf_iterator<char>(in), {});
    }
    SPLICE_ASSIGN_OR_RETURN(files_, NeededFiles(options_.name, listing_, index));
    return absl::OkStatus();
  }

  // Files that an earlier pull has left in place or beside it are not fetched again.
  absl::Status FindMissing(const PullRecord& record) {
    for (const HubFile& file : files_) {
      if (Stopped()) return absl::CancelledError("stopped");
      std::error_code error;
      const std::string path = options_.dir + "/" + file.name, staged = staging_ + "/" + StagedName(file);
      const bool recorded = std::any_of(record.files.begin(), record.files.end(), [&](const HubFile& old) {
        return old.name == file.name && old.digest == file.digest && file.digest.known();
      });
      if (file.digest.known() && fs::file_size(staged, error) == file.size && !error) continue;
      if (file.digest.known() && fs::file_size(path, error) == file.size && !error) {
        if (recorded) continue;
        SPLICE_ASSIGN_OR_RETURN(const FileDigest digest, DigestOfFile(path, file.digest.kind));
        if (digest == file.digest) continue;
      }
      downloads_.emplace_back().file = file;
    }
    return absl::OkStatus();
  }

  absl::Status CheckRoom() const {
    uint64_t needed = 0;
    for (const Download& download : downloads_) {
      std::error_code error;
      const uint64_t part = fs::file_size(staging_ + "/" + StagedName(download.file) + ".part", error);
      needed += download.file.size - (error ? 0 : std::min(part, download.file.size));
    }
    std::error_code error;
    const fs::space_info space = fs::space(staging_, error);
    if (error || needed == 0 || space.available >= needed + options_.spare_bytes) return absl::OkStatus();
    return Errorf(
        absl::StatusCode::kResourceExhausted,
        "{} has {} free, {} needs {} more and {} to spare: make room, or choose another folder (SPLICE_MODELS, "
        "splice pull --to DIR)",
        options_.dir, FormatByteSize(space.available), options_.name.ToString(), FormatByteSize(needed),
        FormatByteSize(options_.spare_bytes));
  }

  absl::Status FetchAll() {
    if (downloads_.empty()) return absl::OkStatus();
    fetch_start_ = Clock::now();
    stage_ = PullProgress::Stage::kFetching;
    std::atomic<size_t> next{0};
    const int count = std::clamp(options_.parallel, 1, static_cast<int>(downloads_.size()));
    return Together(count, [&](HubClient& hub) {
      while (true) {
        const size_t i = next++;
        if (i >= downloads_.size()) return absl::OkStatus();
        // The calling thread reads the file's size meanwhile.
        HubFile file = downloads_[i].file;
        SPLICE_RETURN_IF_ERROR(DownloadFile(hub, Downloads(), file, downloads_[i].done));
        std::lock_guard lock(learned_mutex_);
        learned_.push_back(file);
        downloads_[i].complete = true;
      }
    });
  }

  absl::Status MoveInPlace(const PullRecord& old) {
    for (const HubFile& learned : learned_) {
      for (HubFile& file : files_) {
        if (file.name == learned.name) file = learned;
      }
    }
    RemovePullRecord(options_.dir);  // until it is written again the folder is not complete
    std::set<std::string> names;
    for (const HubFile& file : files_) {
      names.insert(file.name);
      std::error_code error;
      const std::string staged = staging_ + "/" + StagedName(file);
      if (!fs::exists(staged, error)) continue;
      fs::rename(staged, options_.dir + "/" + file.name, error);
      if (error)
        return Errorf(absl::StatusCode::kFailedPrecondition, "{}/{}: {}", options_.dir, file.name, error.message());
    }
    std::error_code ignored;
    for (const HubFile& file : old.files) {
      const bool is_plain = file.name.find('/') == std::string::npos;
      if (is_plain && !names.contains(file.name)) fs::remove(options_.dir + "/" + file.name, ignored);
    }
    SPLICE_RETURN_IF_ERROR(WritePullRecord(options_.dir, {options_.name, listing_.commit, files_}));
    for (const auto& entry : fs::directory_iterator(staging_, ignored)) {
      const std::string name = entry.path().filename().string();
      if (name != "lock" && name != "record.json") fs::remove(entry.path(), ignored);
    }
    if (const int fd = ::open(options_.dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC); fd >= 0) {
      ::fsync(fd);
      ::close(fd);
    }
    return absl::OkStatus();
  }

  const PullOptions& options_;
  const std::string staging_;
  const Clock::time_point start_;
  Clock::time_point fetch_start_;
  PullProgress::Stage stage_ = PullProgress::Stage::kListing;
  HubListing listing_;
  std::vector<HubFile> files_;
  std::deque<Download> downloads_;
  std::mutex learned_mutex_;  // guards learned_ while files are fetched
  std::vector<HubFile> learned_;
};

}  // namespace

absl::StatusOr<PullResult> PullModel(const PullOptions& options) { return Pull(options).Run(); }

}  // namespace spl::hub
