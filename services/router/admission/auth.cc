#include "services/router/admission/auth.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/sha.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <sstream>

#include "services/base/read_file.h"
#include "services/router/request/api_error.h"

namespace spl::router {
namespace {

constexpr char kPublicDomain[] = "splice/v1/public-namespace";
constexpr size_t kMinSecretBytes = 16;

std::string Sha256Hex(std::string_view text) {
  std::array<uint8_t, SHA256_DIGEST_LENGTH> digest;
  SHA256(reinterpret_cast<const uint8_t*>(text.data()), text.size(), digest.data());
  std::string hex;
  for (const uint8_t byte : digest) hex += fmt::format("{:02x}", byte);
  return hex;
}

void AppendField(std::string* message, std::string_view field) {
  const uint64_t size = field.size();
  for (int shift = 0; shift < 64; shift += 8) message->push_back(static_cast<char>(size >> shift & 0xff));
  message->append(field);
}

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

// True: the word is a limit. InvalidArgument: it has the form of a limit, but a malformed value.
absl::StatusOr<bool> ReadLimit(std::string_view word, double* weight, CallerLimits* limits) {
  const size_t equals = word.find('=');
  if (equals == std::string_view::npos) return false;
  const std::string_view name = word.substr(0, equals), text = word.substr(equals + 1);
  const auto read = [&](auto* value) -> absl::StatusOr<bool> {
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), *value);
    if (error == std::errc() && end == text.data() + text.size() && *value > 0) return true;
    return InvalidArgument("{} needs a positive number, got \"{}\"", name, text);
  };
  if (name == "rpm") return read(&limits->requests_per_minute);
  if (name == "tpm") return read(&limits->tokens_per_minute);
  if (name == "concurrent") return read(&limits->max_concurrent);
  if (name != "weight") return false;
  SPLICE_RETURN_IF_ERROR(read(weight).status());
  if (!(*weight >= 0.01 && *weight <= 100))
    return InvalidArgument("weight must be between 0.01 and 100, got {}", *weight);
  return true;
}

}  // namespace

absl::StatusOr<ApiKeys> ApiKeys::Load(const std::string& path) {
  ApiKeys keys;
  keys.table_ = std::make_shared<Table>();
  keys.table_->path = path;
  keys.table_->stamp = StampOf(path);
  SPLICE_ASSIGN_OR_RETURN(keys.table_->holders, Read(path));
  return keys;
}

absl::StatusOr<std::shared_ptr<const ApiKeys::Holders>> ApiKeys::Read(const std::string& path) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(path));
  auto holders = std::make_shared<Holders>();
  std::istringstream lines(text);
  std::string line;
  for (int number = 1; std::getline(lines, line); ++number) {
    std::string_view entry = Trim(line);
    if (entry.empty() || entry.front() == '#') continue;
    const size_t space = entry.find_first_of(" \t");
    const std::string_view key = entry.substr(0, space);
    entry = space == std::string_view::npos ? std::string_view() : Trim(entry.substr(space));
    Holder holder;
    // Reads from the end: the words before the first limit are the name, which may have spaces.
    while (!entry.empty()) {
      const size_t last = entry.find_last_of(" \t");
      const std::string_view word = last == std::string_view::npos ? entry : entry.substr(last + 1);
      if (word.starts_with("role=")) {
        if (word != "role=operator" && word != "role=admin")
          return InvalidArgument("{}:{}: {}: the roles are operator and admin", path, number, word);
        (word == "role=admin" ? holder.is_admin : holder.is_operator) = true;
        entry = last == std::string_view::npos ? std::string_view() : Trim(entry.substr(0, last));
        continue;
      }
      const absl::StatusOr<bool> is_limit = ReadLimit(word, &holder.weight, &holder.limits);
      if (!is_limit.ok()) return InvalidArgument("{}:{}: {}", path, number, MessageOf(is_limit.status()));
      if (!*is_limit) break;
      entry = last == std::string_view::npos ? std::string_view() : Trim(entry.substr(0, last));
    }
    const std::string digest = Sha256Hex(key);
    holder.name = entry.empty() ? "key-" + digest.substr(0, 8) : std::string(entry);
    if (!holders->emplace(digest, std::move(holder)).second) {
      return InvalidArgument("{}:{}: the key stands in the file twice", path, number);
    }
  }
  if (holders->empty()) return InvalidArgument("{}: holds no key; give one \"key [name]\" per line", path);
  return std::shared_ptr<const Holders>(std::move(holders));
}

// Mounted secrets change through a symbolic link, which then points to another file.
std::string ApiKeys::StampOf(const std::string& path) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0) return "";
  return fmt::format("{}:{}:{}:{}.{}", info.st_dev, info.st_ino, info.st_size, info.st_mtim.tv_sec,
                     info.st_mtim.tv_nsec);
}

absl::StatusOr<bool> ApiKeys::ReloadIfChanged() {
  if (table_ == nullptr) return false;
  const std::string stamp = StampOf(table_->path);
  {
    std::lock_guard lock(table_->mutex);
    if (stamp == table_->stamp) return false;
    table_->stamp = stamp;
  }
  SPLICE_ASSIGN_OR_RETURN(std::shared_ptr<const Holders> holders, Read(table_->path));
  std::lock_guard lock(table_->mutex);
  table_->holders = std::move(holders);
  return true;
}

absl::StatusOr<Caller> ApiKeys::Authenticate(std::string_view authorization) const {
  if (!enabled()) return Caller{.name = "anonymous"};
  const auto refuse = [](const char* message) {
    return SetErrorCode(absl::Status(absl::StatusCode::kUnauthenticated, message), "invalid_api_key");
  };
  constexpr std::string_view kScheme = "bearer ";
  const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  const std::string_view scheme = authorization.substr(0, kScheme.size());
  if (!std::equal(scheme.begin(), scheme.end(), kScheme.begin(), kScheme.end(),
                  [&](char a, char b) { return lower(a) == b; })) {
    return refuse("an API key is required: send the header \"Authorization: Bearer KEY\"");
  }
  const std::string_view key = Trim(authorization.substr(kScheme.size()));
  // Looking up the digest instead of the key leaves nothing for a timing attack to climb.
  const std::shared_ptr<const Holders> holders = [this] {
    std::lock_guard lock(table_->mutex);
    return table_->holders;
  }();
  const auto it = holders->find(Sha256Hex(key));
  if (it == holders->end()) return refuse("the API key is not valid here");
  const Holder& holder = it->second;
  return Caller{.name = holder.name,
                .secret = std::string(key),
                .weight = holder.weight,
                .limits = holder.limits,
                .is_operator = holder.is_operator,
                .is_admin = holder.is_admin};
}

absl::Status CheckOperator(const ApiKeys& keys, const Caller& caller, bool loopback) {
  if (keys.enabled() && !caller.is_operator)
    return absl::PermissionDeniedError(
        "this is for operators: the key's line in the file of --api-keys must end with role=operator");
  if (!keys.enabled() && !loopback)
    return absl::PermissionDeniedError(
        "without --api-keys operators are served on loopback only: give a file with an operator's key");
  return absl::OkStatus();
}

absl::Status CheckAdmin(const ApiKeys& keys, const Caller& caller, bool loopback) {
  if (loopback) return absl::OkStatus();
  if (!keys.enabled())
    return absl::PermissionDeniedError(
        "without --api-keys the admin API is served on loopback only: give a file with a key of role=admin");
  if (caller.is_operator || caller.is_admin) return absl::OkStatus();
  return absl::PermissionDeniedError(
      "the admin API wants a key whose line in the file of --api-keys ends with role=admin or role=operator");
}

absl::StatusOr<NamespaceKeys> NamespaceKeys::Load(const std::string& secret_path) {
  SPLICE_ASSIGN_OR_RETURN(const std::string text, ReadFile(secret_path));
  NamespaceKeys keys;
  keys.secret_ = std::string(text.substr(0, text.find_last_not_of("\r\n") + 1));
  if (keys.secret_.size() < kMinSecretBytes) {
    return InvalidArgument("{}: a secret needs {} bytes at least, got {}", secret_path, kMinSecretBytes,
                           keys.secret_.size());
  }
  return keys;
}

chunk::Digest NamespaceKeys::Derive(const Caller& caller, std::string_view namespace_name) const {
  // With a secret the caller's name is a field; a public namespace has none.
  if (IsPublic(namespace_name) && !secret_.empty()) return DeriveFields({}, "/public", {namespace_name});
  return DeriveFields(caller, "", {namespace_name});
}

chunk::Digest NamespaceKeys::DeriveKnowledgeBase(const Caller& caller, std::string_view name, uint64_t version) const {
  return DeriveFields(caller, "/knowledge-base", {name, std::to_string(version)});
}

chunk::Digest NamespaceKeys::DeriveOwner(const Caller& caller) const { return DeriveFields(caller, "/owner", {}); }

// The first field is a trust domain followed by the kind, so inputs of two kinds already differ there. Inputs for
// namespaces are the same as before kinds were introduced.
chunk::Digest NamespaceKeys::DeriveFields(const Caller& caller, std::string_view kind,
                                          std::initializer_list<std::string_view> fields) const {
  const auto domain = [&](const char* name) { return std::string(name).append(kind); };
  std::string message;
  std::string key;
  if (!secret_.empty()) {
    key = secret_;
    AppendField(&message, domain("secret"));
    AppendField(&message, caller.name);
  } else if (!caller.secret.empty()) {
    key = caller.secret;
    AppendField(&message, domain("api-key"));
  } else {
    key = kPublicDomain;
    AppendField(&message, domain("public"));
  }
  for (const std::string_view field : fields) AppendField(&message, field);
  chunk::Digest out;
  unsigned int size = 0;
  HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), reinterpret_cast<const uint8_t*>(message.data()),
       message.size(), out.data(), &size);
  return out;
}

}  // namespace spl::router
