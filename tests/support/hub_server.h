// A Hugging Face hub for tests: the list of a repository's files, and the files, over HTTP on loopback. It breaks,
// corrupts, redirects and refuses as it is told.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace spl::testing {

class HubServer {
 public:
  struct Request {
    std::string target, authorization, range;
  };
  // How one file is served; counts go down with each answer.
  struct Rule {
    int64_t break_after = -1;  // bytes of the body behind which the connection is closed
    int breaks = 0;            // how often
    int64_t hold_after = -1;   // bytes behind which the answer waits for Release
    int corruptions = 0;       // how often a byte of the body is wrong
  };

  HubServer();
  ~HubServer();

  std::string address() const;  // 127.0.0.1:PORT
  std::string url() const { return "http://" + address(); }

  // Sets the files of a repository; its commit changes with them. Files that end in .safetensors and tokenizer.json are
  // in LFS.
  void Put(const std::string& repository, const std::map<std::string, std::string>& files);
  // All files of a folder.
  void PutFolder(const std::string& repository, const std::string& dir);
  std::string commit(const std::string& repository) const;

  void SetRule(const std::string& file, const Rule& rule);
  void Release();                               // ends all waits of hold_after, also later ones
  void RequireToken(const std::string& token);  // gated: other callers get 401 (no token) or 403
  void FailNext(int status, int times);         // answers to whatever comes next
  void RedirectLfsTo(const std::string& url);   // url/lfs/SHA256: another HubServer knows the content by AddBlob
  void AddBlob(const std::string& content);
  void HideDigests(bool also_etags);  // lists no digests; with also_etags no file has an ETag either
  void IgnoreRanges();

  std::vector<Request> requests() const;
  // Requests whose target has `part` in it.
  int CountRequests(const std::string& part) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The SHA-256 of a text, as 64 digits.
std::string Sha256Hex(const std::string& text);

}  // namespace spl::testing
