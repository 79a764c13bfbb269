#include "services/hub/file_digest.h"

#include <openssl/evp.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <vector>

#include "services/base/status.h"

namespace spl::hub {
namespace {

bool IsHex(std::string_view text, size_t digits) {
  return text.size() == digits &&
         std::all_of(text.begin(), text.end(), [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

}  // namespace

std::string FileDigest::ToString() const {
  switch (kind) {
    case Kind::kNone:
      return "";
    case Kind::kSha256:
      return "sha256:" + hex;
    case Kind::kGitBlob:
      return "git:" + hex;
  }
  return "";
}

FileDigest ParseFileDigest(std::string_view text) {
  const auto form = [&](FileDigest::Kind kind, std::string_view prefix, size_t digits) {
    if (!text.starts_with(prefix) || !IsHex(text.substr(prefix.size()), digits)) return FileDigest();
    return FileDigest{kind, std::string(text.substr(prefix.size()))};
  };
  const FileDigest sha256 = form(FileDigest::Kind::kSha256, "sha256:", 64);
  return sha256.known() ? sha256 : form(FileDigest::Kind::kGitBlob, "git:", 40);
}

FileDigest DigestOfEtag(std::string_view etag) {
  if (etag.starts_with("W/")) etag.remove_prefix(2);
  if (etag.size() >= 2 && etag.front() == '"' && etag.back() == '"') etag = etag.substr(1, etag.size() - 2);
  if (IsHex(etag, 64)) return {FileDigest::Kind::kSha256, std::string(etag)};
  if (IsHex(etag, 40)) return {FileDigest::Kind::kGitBlob, std::string(etag)};
  return {};
}

FileHasher::FileHasher(FileDigest::Kind kind, uint64_t size) : kind_(kind) {
  if (kind == FileDigest::Kind::kNone) return;
  context_ = EVP_MD_CTX_new();
  EVP_DigestInit_ex(context_, kind == FileDigest::Kind::kSha256 ? EVP_sha256() : EVP_sha1(), nullptr);
  if (kind != FileDigest::Kind::kGitBlob) return;
  const std::string head = fmt::format("blob {}", size);
  EVP_DigestUpdate(context_, head.c_str(), head.size() + 1);  // with the zero behind it
}

FileHasher::~FileHasher() { EVP_MD_CTX_free(context_); }

void FileHasher::Add(std::string_view bytes) {
  if (context_ != nullptr) EVP_DigestUpdate(context_, bytes.data(), bytes.size());
}

FileDigest FileHasher::Finish() {
  if (context_ == nullptr) return {};
  unsigned char digest[EVP_MAX_MD_SIZE];
  unsigned int size = 0;
  EVP_DigestFinal_ex(context_, digest, &size);
  FileDigest result{kind_, ""};
  for (unsigned int i = 0; i < size; ++i) result.hex += fmt::format("{:02x}", digest[i]);
  return result;
}

absl::StatusOr<FileDigest> DigestOfFile(const std::string& path, FileDigest::Kind kind) {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path, error);
  std::ifstream in(path, std::ios::binary);
  if (error || !in) return Errorf(absl::StatusCode::kUnavailable, "{}: cannot be read", path);
  FileHasher hasher(kind, size);
  std::vector<char> piece(1 << 20);
  while (in.read(piece.data(), static_cast<std::streamsize>(piece.size())), in.gcount() > 0)
    hasher.Add({piece.data(), static_cast<size_t>(in.gcount())});
  if (in.bad()) return Errorf(absl::StatusCode::kUnavailable, "{}: cannot be read", path);
  return hasher.Finish();
}

}  // namespace spl::hub
