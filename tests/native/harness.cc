#include "harness.h"

#include <stdlib.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <mutex>
#include <utility>
#include <vector>

namespace cachestore::test {
namespace {

struct TestCase {
  std::string name;  // "Suite.Name"
  void (*body)();
};

// A function's static, as tests register before main in no certain order.
std::vector<TestCase>& Tests() {
  static std::vector<TestCase> tests;
  return tests;
}

std::vector<std::pair<std::string, Role>>& Roles() {
  static std::vector<std::pair<std::string, Role>> roles;
  return roles;
}

// Of the test that is running.
std::mutex mutex;
int failures = 0;
bool skipped = false;

enum class Outcome { kPassed, kFailed, kSkipped };

Outcome Run(const TestCase& test) {
  {
    std::lock_guard lock(mutex);
    failures = 0;
    skipped = false;
  }
  std::printf("[ RUN     ] %s\n", test.name.c_str());
  std::fflush(stdout);
  const auto start = std::chrono::steady_clock::now();
  try {
    test.body();
  } catch (const std::exception& error) {
    Fail(test.name.c_str(), 0, std::string("exception: ") + error.what());
  } catch (...) {
    Fail(test.name.c_str(), 0, "exception of an unknown type");
  }
  const std::chrono::duration<double, std::milli> elapsed =
      std::chrono::steady_clock::now() - start;
  std::lock_guard lock(mutex);
  const Outcome outcome = failures > 0 ? Outcome::kFailed
                          : skipped    ? Outcome::kSkipped
                                       : Outcome::kPassed;
  const char* label = outcome == Outcome::kFailed    ? "FAILED "
                      : outcome == Outcome::kSkipped ? "SKIPPED"
                                                     : "     OK";
  std::printf("[ %s ] %s (%.1f ms)\n", label, test.name.c_str(), elapsed.count());
  std::fflush(stdout);
  return outcome;
}

int RunRole(const std::string& name, const std::vector<std::string>& arguments) {
  for (const auto& [role, run] : Roles()) {
    if (role != name) continue;
    const int status = run(arguments);
    std::lock_guard lock(mutex);
    return failures > 0 ? 1 : status;
  }
  std::fprintf(stderr, "no role %s\n", name.c_str());
  return 2;
}

int Main(int argc, char** argv) {
  if (argc >= 3 && std::string(argv[1]) == "--role") {
    return RunRole(argv[2], {argv + 3, argv + argc});
  }
  std::string filter;
  bool list = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--list") {
      list = true;
    } else if (argument == "--filter" && i + 1 < argc) {
      filter = argv[++i];
    } else {
      std::fprintf(stderr, "usage: %s [--list] [--filter SUBSTRING]\n", argv[0]);
      return 2;
    }
  }

  std::vector<TestCase> selected;
  std::copy_if(Tests().begin(), Tests().end(), std::back_inserter(selected),
               [&](const TestCase& test) { return test.name.find(filter) != std::string::npos; });
  if (list) {
    for (const TestCase& test : selected) std::printf("%s\n", test.name.c_str());
    return 0;
  }

  int passed = 0;
  std::vector<std::string> failed;
  for (const TestCase& test : selected) {
    const Outcome outcome = Run(test);
    if (outcome == Outcome::kPassed) ++passed;
    if (outcome == Outcome::kFailed) failed.push_back(test.name);
  }
  for (const std::string& name : failed) std::printf("failed: %s\n", name.c_str());
  const size_t skips = selected.size() - failed.size() - static_cast<size_t>(passed);
  if (skips > 0) std::printf("%zu skipped\n", skips);
  std::printf("%d passed, %zu failed\n", passed, failed.size());
  if (selected.empty() || !failed.empty()) return 1;
  return passed > 0 ? 0 : 77;
}

}  // namespace

bool Register(const char* suite, const char* name, void (*body)()) {
  Tests().push_back({std::string(suite) + "." + name, body});
  return true;
}

bool RegisterRole(const char* name, Role role) {
  Roles().emplace_back(name, role);
  return true;
}

void Fail(const char* file, int line, const std::string& text) {
  std::lock_guard lock(mutex);
  ++failures;
  std::printf("%s:%d: %s\n", file, line, text.c_str());
  std::fflush(stdout);
}

void Skip(const char* file, int line, const std::string& reason) {
  std::lock_guard lock(mutex);
  skipped = true;
  std::printf("%s:%d: skipped: %s\n", file, line, reason.c_str());
}

TempDir::TempDir(const std::string& parent) {
  const char* environment = getenv("TMPDIR");
  path_ = !parent.empty() ? parent : environment && *environment ? environment : "/tmp";
  path_ += "/cachestore-test-XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) {
    std::fprintf(stderr, "mkdtemp %s: %s\n", path_.c_str(), std::strerror(errno));
    abort();
  }
}

TempDir::~TempDir() {
  namespace fs = std::filesystem;
  std::error_code error;
  // A test may have taken the permissions away that removing needs.
  fs::permissions(path_, fs::perms::owner_all, fs::perm_options::add, error);
  for (fs::recursive_directory_iterator it(path_, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code ignored;
    if (fs::is_directory(it->symlink_status(ignored))) {
      fs::permissions(it->path(), fs::perms::owner_all, fs::perm_options::add, ignored);
    }
  }
  fs::remove_all(path_, error);
  if (error) {
    std::fprintf(stderr, "can't remove %s: %s\n", path_.c_str(), error.message().c_str());
  }
}

}  // namespace cachestore::test

int main(int argc, char** argv) { return cachestore::test::Main(argc, argv); }
