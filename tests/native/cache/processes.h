// Helper processes: the test program started again in a role, so that a test
// can kill and stop what it must not kill and stop itself. No fork without
// exec: sanitizers and threads don't survive that.
//
//   ROLE(Echo) {
//     while (const auto line = HearParent()) TellParent(*line);
//     return 0;
//   }
//   Process echo("Echo");
//   EXPECT_EQ(echo.Ask("hello"), "hello");
//
// Both sides talk in lines over one socket, the child's standard input. Every
// wait is bounded; a process ends with its object, and with the test program.
#ifndef CACHESTORE_TESTS_CACHE_PROCESSES_H_
#define CACHESTORE_TESTS_CACHE_PROCESSES_H_

#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "fault_env.h"
#include "harness.h"

namespace cachestore::test {

#define ROLE(Name)                                                   \
  static int Name##_Role(const std::vector<std::string>& arguments); \
  [[maybe_unused]] static const bool Name##_registered =             \
      ::cachestore::test::RegisterRole(#Name, &Name##_Role);         \
  static int Name##_Role([[maybe_unused]] const std::vector<std::string>& arguments)

// No answer of a child takes longer, on a busy machine and under sanitizers.
inline constexpr std::chrono::seconds kAnswerBound{30};

class Process {
 public:
  // `prefix`: a command that runs this program, such as unshare.
  explicit Process(const std::string& role, const std::vector<std::string>& arguments = {},
                   const std::vector<std::string>& prefix = {});
  ~Process();  // kills it
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Say(const std::string& line);
  // The child's next line; "" if it ended or said nothing in time.
  std::string Hear(std::chrono::milliseconds at_most = kAnswerBound);
  std::string Ask(const std::string& line) {
    Say(line);
    return Hear();
  }

  pid_t pid() const { return pid_; }
  // SIGKILL; returns when the kernel has taken everything back.
  void Kill();
  // SIGSTOP; returns when it has stopped.
  void Stop();
  void Continue();
  // False if it is neither stopped nor ended in time.
  [[nodiscard]] bool WaitStopped();
  // Exit status, or -signal; nullopt (and killed) if it didn't end in time.
  std::optional<int> WaitEnded(std::chrono::milliseconds at_most = kAnswerBound);
  // Closes our side, on which a role's loop ends, and waits.
  std::optional<int> Finish();

 private:
  bool WaitState(int options, std::chrono::milliseconds at_most);

  pid_t pid_ = -1;
  int socket_ = -1;
  std::string heard_;  // not returned yet
  bool ended_ = false;
  bool stopped_ = false;
  int status_ = 0;
};

// The child's side.
std::optional<std::string> HearParent();
void TellParent(const std::string& line);

}  // namespace cachestore::test

#endif  // CACHESTORE_TESTS_CACHE_PROCESSES_H_
