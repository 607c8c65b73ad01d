// A team of threads that run one function together and meet at barriers. The calling thread is member 0.
//
// Members spin for a while, because a pass has hundreds of barriers; then they sleep between jobs, and yield at barriers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace tandem {

class Team;

// One thread's place in a running job, and memory of its own that grows and is kept.
struct Member {
    Team &team;
    int index, count;

    // Wait until every member is here; what each wrote before is seen by all after.
    void meet();
    // The next of a job's shared numbers 0, 1, 2, ... since the last `meet`; each is handed out once.
    int64_t take();
    // At least `bytes` of 64-byte aligned memory of this member, by purpose; its contents last until asked for again. Without
    // memory the process ends: a member cannot leave a job in which others wait for it.
    void *scratch(int purpose, size_t bytes) noexcept;

  private:
    friend class Team;
    std::vector<std::unique_ptr<uint8_t[]>> memory_;
    std::vector<size_t> sizes_;
    int64_t meetings_ = 0;
    Member(Team &team, int index, int count) : team(team), index(index), count(count) {}
};

class Team {
  public:
    // A team lasts as long as the process.
    explicit Team(int count);
    // Run `job`, which must not throw, on every member and wait for all. Callers from several threads take turns.
    void run(const std::function<void(Member &)> &job);

  private:
    friend struct Member;
    void serve(int index);
    std::mutex turn_;
    std::vector<std::unique_ptr<Member>> members_;
    const std::function<void(Member &)> *job_ = nullptr;
    alignas(64) std::atomic<uint64_t> posted_{0};    // jobs given out
    alignas(64) std::atomic<uint64_t> finished_{0};  // members that are done with them
    alignas(64) std::atomic<uint64_t> arrived_{0};   // members at barriers, ever
    alignas(64) std::atomic<int64_t> next_[2] = {};  // shared numbers, by parity of the barrier
};

}  // namespace tandem
