#include "services/hub/file_download.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>
#include <vector>

#include "services/base/status.h"

namespace spl::hub {
namespace {

namespace fs = std::filesystem;

constexpr std::chrono::milliseconds kMaxPause{8'000};
constexpr int kMaxWrong = 2;  // complete files with another digest

absl::Status DiskError(const std::string& path) {
  return Errorf(
      errno == ENOSPC || errno == EDQUOT ? absl::StatusCode::kResourceExhausted : absl::StatusCode::kFailedPrecondition,
      "{}: {}", path, std::strerror(errno));
}

bool IsWorthAnotherTry(const absl::Status& status) {
  return status.code() == absl::StatusCode::kUnavailable || status.code() == absl::StatusCode::kDeadlineExceeded;
}

// The .part file, and the digest of what is in it.
class PartFile {
 public:
  explicit PartFile(std::string path) : path_(std::move(path)) {}
  ~PartFile() {
    if (fd_ >= 0) ::close(fd_);
  }

  // Opens the file at its end. `file` tells whether what is there can be kept.
  absl::Status Open(const HubFile& file) {
    fd_ = ::open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
    if (fd_ < 0) return DiskError(path_);
    const off_t end = ::lseek(fd_, 0, SEEK_END);
    size_ = end > 0 ? static_cast<uint64_t>(end) : 0;
    // A Git blob's digest begins with the size of the whole file.
    const bool can_be_hashed = file.digest.known() && (file.digest.kind != FileDigest::Kind::kGitBlob || file.size > 0);
    if (!can_be_hashed || (file.size > 0 && size_ > file.size)) return Restart(file);
    return HashWhatIsThere(file);
  }

  absl::Status Restart(const HubFile& file) {
    if (::ftruncate(fd_, 0) != 0 || ::lseek(fd_, 0, SEEK_SET) != 0) return DiskError(path_);
    size_ = 0;
    hasher_ = std::make_unique<FileHasher>(file.digest.kind, file.size);
    return absl::OkStatus();
  }

  absl::Status Append(std::string_view bytes) {
    hasher_->Add(bytes);
    while (!bytes.empty()) {
      const ssize_t written = ::write(fd_, bytes.data(), bytes.size());
      if (written < 0 && errno != EINTR) return DiskError(path_);
      if (written < 0) continue;
      bytes.remove_prefix(written);
      size_ += static_cast<uint64_t>(written);
    }
    return absl::OkStatus();
  }

  // The digest of all that is there, once.
  FileDigest Digest() { return hasher_->Finish(); }

  absl::Status MoveTo(const std::string& path) {
    if (::fsync(fd_) != 0 || std::rename(path_.c_str(), path.c_str()) != 0) return DiskError(path_);
    return absl::OkStatus();
  }

  uint64_t size() const { return size_; }

 private:
  absl::Status HashWhatIsThere(const HubFile& file) {
    hasher_ = std::make_unique<FileHasher>(file.digest.kind, file.size);
    std::vector<char> piece(1 << 20);
    for (uint64_t at = 0; at < size_;) {
      const ssize_t read = ::pread(fd_, piece.data(), piece.size(), static_cast<off_t>(at));
      if (read <= 0) return read < 0 ? DiskError(path_) : Restart(file);
      hasher_->Add({piece.data(), static_cast<size_t>(read)});
      at += static_cast<uint64_t>(read);
    }
    return absl::OkStatus();
  }

  const std::string path_;
  int fd_ = -1;
  uint64_t size_ = 0;
  std::unique_ptr<FileHasher> hasher_;
};

// Fetches from where the part ends.
absl::Status FetchRest(HubClient& client, const DownloadOptions& options, HubFile& file, PartFile& part,
                       std::atomic<uint64_t>& done) {
  const auto on_head = [&](const HubClient::FileHead& head) -> absl::Status {
    const HubFile before = file;
    if (!file.digest.known()) file.digest = head.digest;
    if (file.size == 0) file.size = head.size;
    const bool learned = file.digest != before.digest || file.size != before.size;
    if (head.size != 0 && head.size != file.size)
      return Errorf(absl::StatusCode::kDataLoss, "{} has {} bytes, the list of files says {}", file.name, head.size,
                    file.size);
    if (head.offset != part.size() || (learned && head.offset == 0)) {
      SPLICE_RETURN_IF_ERROR(part.Restart(file));
      done = 0;
    }
    return absl::OkStatus();
  };
  const auto on_data = [&](std::string_view bytes) -> absl::Status {
    if (file.size > 0 && part.size() + bytes.size() > file.size)
      return Errorf(absl::StatusCode::kDataLoss, "{} is longer than {} bytes", file.name, file.size);
    SPLICE_RETURN_IF_ERROR(part.Append(bytes));
    done = part.size();
    return absl::OkStatus();
  };
  SPLICE_RETURN_IF_ERROR(client.Fetch(options.repository, options.commit, file.name, part.size(), {on_head, on_data}));
  if (part.size() < file.size)
    return Errorf(absl::StatusCode::kUnavailable, "{} ended after {} of {} bytes", file.name, part.size(), file.size);
  return absl::OkStatus();
}

// One try: DataLoss leaves no part.
absl::Status TryOnce(HubClient& client, const DownloadOptions& options, HubFile& file, std::atomic<uint64_t>& done) {
  const std::string target = options.folder + "/" + StagedName(file), part_path = target + ".part";
  PartFile part(part_path);
  SPLICE_RETURN_IF_ERROR(part.Open(file));
  done = part.size();
  absl::Status status;
  if (file.size == 0 || part.size() < file.size || !file.digest.known())
    status = FetchRest(client, options, file, part, done);
  if (status.code() == absl::StatusCode::kOutOfRange) status = absl::DataLossError("the part is too long");
  if (status.ok() && file.digest.known()) {
    const FileDigest got = part.Digest();
    if (got != file.digest)
      status = Errorf(absl::StatusCode::kDataLoss, "{}: the bytes that came have {}, the hub says {}", file.name,
                      got.ToString(), file.digest.ToString());
  }
  if (status.code() == absl::StatusCode::kDataLoss) {
    std::error_code ignored;
    fs::remove(part_path, ignored);
    done = 0;
  }
  SPLICE_RETURN_IF_ERROR(status);
  if (file.size == 0) file.size = part.size();
  return part.MoveTo(options.folder + "/" + StagedName(file));
}

}  // namespace

std::string StagedName(const HubFile& file) { return file.digest.known() ? file.digest.hex : "name-" + file.name; }

absl::Status DownloadFile(HubClient& client, const DownloadOptions& options, HubFile& file,
                          std::atomic<uint64_t>& done) {
  auto pause = options.first_pause;
  for (int tries = 1, wrong = 0;; ++tries) {
    const uint64_t before = done;
    const absl::Status status = TryOnce(client, options, file, done);
    if (status.ok()) return status;
    if (status.code() == absl::StatusCode::kDataLoss) {
      if (++wrong >= kMaxWrong) return Annotate(status, "fetched twice and thrown away");
      continue;
    }
    if (done > before) {
      tries = 1;
      pause = options.first_pause;
    }
    if (!IsWorthAnotherTry(status) || tries >= options.max_tries) return Annotate(status, file.name);
    if (!client.Pause(pause)) return absl::CancelledError("stopped");
    pause = std::min(2 * pause, kMaxPause);
  }
}

}  // namespace spl::hub
