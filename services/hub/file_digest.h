// Checksums of files as a hub states them.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

struct evp_md_ctx_st;

namespace spl::hub {

struct FileDigest {
  enum class Kind {
    kNone,     // the hub states nothing
    kSha256,   // SHA-256 of the content: files in Git LFS
    kGitBlob,  // SHA-1 of "blob SIZE\0" and the content: files in Git itself
  };
  Kind kind = Kind::kNone;
  std::string hex;  // lower case

  bool operator==(const FileDigest&) const = default;
  bool known() const { return kind != Kind::kNone; }
  // "sha256:…", "git:…" or "".
  std::string ToString() const;
};

// From the form of ToString. Anything else, or the wrong number of digits: kNone.
FileDigest ParseFileDigest(std::string_view text);
// From an ETag of a hub, which is 64 digits of SHA-256 or 40 of a Git blob; another form: kNone.
FileDigest DigestOfEtag(std::string_view etag);

// Computes a digest of content that arrives in pieces.
class FileHasher {
 public:
  // `size` is that of the whole file.
  FileHasher(FileDigest::Kind kind, uint64_t size);
  ~FileHasher();
  void Add(std::string_view bytes);
  // Once.
  FileDigest Finish();

 private:
  const FileDigest::Kind kind_;
  evp_md_ctx_st* context_ = nullptr;  // null: kNone
};

// The digest of a file on disk. Unavailable: it cannot be read.
absl::StatusOr<FileDigest> DigestOfFile(const std::string& path, FileDigest::Kind kind);

}  // namespace spl::hub
