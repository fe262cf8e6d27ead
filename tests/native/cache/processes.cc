#include "cache/processes.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <thread>

extern char** environ;

namespace cachestore::test {
namespace {

// A line from `socket`, with what came before in `heard`. nullopt at the end of
// the stream or of the time.
std::optional<std::string> ReadLine(int socket, std::string& heard,
                                    std::chrono::milliseconds at_most) {
  const auto end = std::chrono::steady_clock::now() + at_most;
  for (;;) {
    if (const size_t at = heard.find('\n'); at != std::string::npos) {
      std::string line = heard.substr(0, at);
      heard.erase(0, at + 1);
      return line;
    }
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
    if (left.count() <= 0) return std::nullopt;
    pollfd waited = {socket, POLLIN, 0};
    const int ready = poll(&waited, 1, static_cast<int>(left.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return std::nullopt;
    char bytes[4096];
    const ssize_t n = read(socket, bytes, sizeof bytes);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return std::nullopt;
    heard.append(bytes, static_cast<size_t>(n));
  }
}

void WriteLine(int socket, const std::string& line) {
  const std::string text = line + "\n";
  size_t sent = 0;
  while (sent < text.size()) {
    const ssize_t n = send(socket, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // the other side is gone: it is heard so
    sent += static_cast<size_t>(n);
  }
}

}  // namespace

Process::Process(const std::string& role, const std::vector<std::string>& arguments,
                 const std::vector<std::string>& prefix) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
    Fail(__FILE__, __LINE__, std::string("socketpair: ") + strerror(errno));
    ended_ = true;
    return;
  }
  char self[4096];
  const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
  std::vector<std::string> words = prefix;
  words.emplace_back(self, static_cast<size_t>(std::max<ssize_t>(length, 0)));
  words.insert(words.end(), {"--role", role});
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, pair[1], STDIN_FILENO);
  const int error = posix_spawnp(&pid_, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  close(pair[1]);
  socket_ = pair[0];
  if (error != 0) {
    Fail(__FILE__, __LINE__, std::string("starting ") + argv[0] + ": " + strerror(error));
    ended_ = true;
  }
}

Process::~Process() {
  Kill();
  if (socket_ >= 0) close(socket_);
}

void Process::Say(const std::string& line) {
  if (socket_ >= 0) WriteLine(socket_, line);
}

std::string Process::Hear(std::chrono::milliseconds at_most) {
  if (socket_ < 0) return "";
  return ReadLine(socket_, heard_, at_most).value_or("");
}

// Looks with growing pauses: waitpid has no time limit.
bool Process::WaitState(int options, std::chrono::milliseconds at_most) {
  if (ended_) return true;
  const auto end = std::chrono::steady_clock::now() + at_most;
  auto pause = std::chrono::microseconds(100);
  for (;;) {
    int status = 0;
    const pid_t waited = waitpid(pid_, &status, options | WNOHANG);
    if (waited == pid_ || (waited < 0 && errno == ECHILD)) {
      if (waited == pid_ && WIFSTOPPED(status)) {
        stopped_ = true;
      } else {
        ended_ = true;
        status_ = status;
      }
      return true;
    }
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(pause);
    if (pause < std::chrono::milliseconds(5)) pause *= 2;
  }
}

void Process::Kill() {
  if (ended_) return;
  (void)kill(pid_, SIGKILL);
  if (!WaitState(0, kAnswerBound)) Fail(__FILE__, __LINE__, "a killed process doesn't end");
}

void Process::Stop() {
  if (ended_) return;
  (void)kill(pid_, SIGSTOP);
  (void)WaitStopped();
}

bool Process::WaitStopped() {
  if (stopped_) return true;
  return WaitState(WUNTRACED, kAnswerBound) && stopped_;
}

void Process::Continue() {
  if (ended_) return;
  stopped_ = false;
  (void)kill(pid_, SIGCONT);
}

std::optional<int> Process::WaitEnded(std::chrono::milliseconds at_most) {
  if (!WaitState(0, at_most)) {
    Kill();
    return std::nullopt;
  }
  return WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_);
}

std::optional<int> Process::Finish() {
  if (socket_ >= 0) shutdown(socket_, SHUT_WR);
  return WaitEnded();
}

std::optional<std::string> HearParent() {
  // The test program's end is ours, also if it was killed.
  [[maybe_unused]] static const int bound = prctl(PR_SET_PDEATHSIG, SIGKILL);
  static std::string heard;
  return ReadLine(STDIN_FILENO, heard, std::chrono::hours(1));
}

void TellParent(const std::string& line) { WriteLine(STDIN_FILENO, line); }

}  // namespace cachestore::test
