// Ranks find each other; see meeting.h.
#include "dist/meeting.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <optional>
#include <sstream>

#include "dist/sockets.h"
#include "kernels/error.h"

namespace {

constexpr double stranger_seconds = 10;  // to introduce oneself
constexpr double linger_seconds = 1;     // in which ranks that come late still hear why the run has ended
constexpr double answer_slack = 5;       // for rank 0's answer, beyond the timeout that it keeps itself

uint64_t run_number(const std::string& job) {
    uint64_t value = 14695981039346656037u;  // FNV-1a
    for (const char c : job) value = (value ^ static_cast<unsigned char>(c)) * 1099511628211u;
    return value;
}

Hello hello_of(const RankEnvironment& environment, Channel channel) {
    Hello hello = {.channel = channel,
                   .rank = environment.rank,
                   .ranks = environment.ranks,
                   .node = environment.node,
                   .run = run_number(environment.job)};
    gethostname(hello.host, sizeof(hello.host) - 1);
    return hello;
}

// ---------------------------------------------------------------------------------------------------
// Rank 0's answer

enum class Kind : uint32_t {
    welcome,  // the text is the table of ranks
    refusal,  // the text says why this process is not of this run
    failure,  // the run has failed; rank 0 has said why
};

struct AnswerHead {
    Kind kind;
    uint32_t bytes;
};

void answer(int socket, Kind kind, const std::string& text) {
    const AnswerHead head = {kind, static_cast<uint32_t>(text.size())};
    std::string message(reinterpret_cast<const char*>(&head), sizeof(head));
    message += text;
    send_all(socket, message.data(), message.size());  // one that is gone shows soon enough
}

std::optional<std::pair<Kind, std::string>> receive_answer(int socket, double deadline) {
    AnswerHead head;
    if (!receive_all(socket, &head, sizeof(head), deadline)) return {};
    constexpr uint32_t largest = 1 << 24;
    if (head.kind > Kind::failure || head.bytes > largest) return {};
    std::string text(head.bytes, '\0');
    if (!receive_all(socket, text.data(), text.size(), deadline)) return {};
    return std::pair(head.kind, text);
}

enum class Reading { more, whole, stranger };

Reading read_hello(Newcomer& newcomer) {
    char* bytes = reinterpret_cast<char*>(&newcomer.hello);
    const ssize_t n =
        recv(newcomer.socket, bytes + newcomer.received, sizeof(Hello) - newcomer.received, MSG_DONTWAIT);
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return Reading::more;
    if (n <= 0) return Reading::stranger;
    newcomer.received += static_cast<size_t>(n);
    const Hello ours = {};
    if (memcmp(bytes, ours.magic, std::min(newcomer.received, sizeof(ours.magic))) != 0)
        return Reading::stranger;
    newcomer.hello.host[sizeof(ours.host) - 1] = '\0';
    return newcomer.received == sizeof(Hello) ? Reading::whole : Reading::more;
}

// ---------------------------------------------------------------------------------------------------
// Rank 0

// "2, 5-7"
std::string list_of(const std::vector<int>& numbers) {
    std::string text;
    for (size_t i = 0; i < numbers.size();) {
        size_t end = i + 1;
        while (end < numbers.size() && numbers[end] == numbers[end - 1] + 1) end++;
        text += (text.empty() ? "" : ", ") + std::to_string(numbers[i]);
        if (end - i > 1) text += (end - i == 2 ? ", " : "-") + std::to_string(numbers[end - 1]);
        i = end;
    }
    return text;
}

std::string missing_ranks(const Meeting& meeting, double timeout) {
    std::vector<int> missing;
    for (size_t rank = 1; rank < meeting.values.size(); rank++) {
        if (meeting.values[rank] < 0 || meeting.signals[rank] < 0) missing.push_back(static_cast<int>(rank));
    }
    char seconds[32];
    snprintf(seconds, sizeof(seconds), "%g", timeout);
    return std::string(missing.size() == 1 ? "rank " : "ranks ") + list_of(missing) + " of " +
           std::to_string(meeting.values.size()) + " did not arrive within " + seconds + " s";
}

// Ends all ranks that have met, and those that come within a moment.
[[noreturn]] void end_meeting(const Meeting& meeting, Door& door, const std::string& why,
                              void (*report)(const std::string&)) {
    report(why);  // first: a launcher may end this process as soon as another one ends
    for (const std::vector<int>* sockets : {&meeting.values, &meeting.signals}) {
        for (const int socket : *sockets) {
            if (socket >= 0) answer(socket, Kind::failure, "");
        }
    }
    accept_hellos(door, monotonic_seconds() + linger_seconds, [](const Hello&, int socket) {
        answer(socket, Kind::failure, "");
        return false;
    });
    _exit(1);
}

// Why a rank does not fit in, or "".
std::string misfit(const Hello& hello, const Meeting& meeting) {
    const int ranks = static_cast<int>(meeting.values.size());
    const std::string name = "rank " + std::to_string(hello.rank);
    if (hello.ranks != ranks) {
        return name + " (" + hello.host + ") counts " + std::to_string(hello.ranks) +
               " ranks, rank 0 counts " + std::to_string(ranks) + " (WORLD_SIZE)";
    }
    const bool known = hello.rank >= 0 && hello.rank < ranks;
    const std::vector<int>& channel = hello.channel == Channel::values ? meeting.values : meeting.signals;
    if (known && hello.rank != 0 && channel[static_cast<size_t>(hello.rank)] < 0) return "";
    return known ? "two processes claim to be " + name + " (RANK)"
                 : name + " is none of " + std::to_string(ranks);
}

// Numbers nodes, named by their launcher or else by their machine, in the order of the ranks.
std::vector<int> number_nodes(const std::vector<Hello>& hellos) {
    std::map<std::string, int> numbers;
    std::vector<int> nodes;
    for (const Hello& hello : hellos) {
        const std::string name =
            hello.node >= 0 ? "node " + std::to_string(hello.node) : std::string("host ") + hello.host;
        nodes.push_back(numbers.emplace(name, static_cast<int>(numbers.size())).first->second);
    }
    return nodes;
}

// What rank 0 knows of the ranks, a line each: node, machine, and its address; "-" for rank 0's machine,
// since a loopback address means another machine elsewhere.
std::string table_of_ranks(const Meeting& meeting) {
    std::ostringstream text;
    for (size_t rank = 0; rank < meeting.nodes.size(); rank++) {
        const std::string& address = meeting.addresses[rank];
        const std::string& host = meeting.hosts[rank];
        text << meeting.nodes[rank] << ' ' << (host.empty() ? "?" : host) << ' '
             << (address.empty() || is_loopback(address) ? "-" : address) << '\n';
    }
    return text.str();
}

Meeting lead_meeting(const RankEnvironment& environment, double timeout, void (*report)(const std::string&)) {
    const size_t ranks = static_cast<size_t>(environment.ranks);
    Door door = {environment.listening_socket >= 0 ? environment.listening_socket
                                                   : listen_at(environment.address, environment.port)};
    set_nonblocking(door.listener);
    Meeting meeting;
    meeting.values.assign(ranks, -1), meeting.signals.assign(ranks, -1), meeting.addresses.resize(ranks);
    const Hello own = hello_of(environment, Channel::values);
    std::vector<Hello> hellos(ranks, own);
    size_t missing = 2 * (ranks - 1);
    const bool complete =
        accept_hellos(door, monotonic_seconds() + timeout, [&](const Hello& hello, int socket) {
            if (hello.run != own.run || hello.channel == Channel::data) {
                answer(socket, Kind::refusal, "another run meets there; choose another MASTER_PORT");
                close(socket);
                return false;
            }
            const std::string why = misfit(hello, meeting);
            if (!why.empty()) {
                answer(socket, Kind::failure, "");
                end_meeting(meeting, door, why, report);
            }
            const size_t rank = static_cast<size_t>(hello.rank);
            (hello.channel == Channel::values ? meeting.values : meeting.signals)[rank] = socket;
            hellos[rank] = hello;
            meeting.addresses[rank] = peer_address(socket);
            return --missing == 0;
        });
    if (!complete) end_meeting(meeting, door, missing_ranks(meeting, timeout), report);
    close_door(door);
    meeting.nodes = number_nodes(hellos);
    for (const Hello& hello : hellos) meeting.hosts.push_back(hello.host);
    const std::string table = table_of_ranks(meeting);
    for (size_t rank = 1; rank < ranks; rank++) {
        answer(meeting.values[rank], Kind::welcome, table);
        answer(meeting.signals[rank], Kind::welcome, table);
    }
    return meeting;
}

// ---------------------------------------------------------------------------------------------------
// The others

// The table of ranks, once rank 0 has sent it.
std::string await_welcome(const RankEnvironment& environment, int socket, double timeout) {
    const auto said = receive_answer(socket, monotonic_seconds() + timeout + answer_slack);
    const std::string where = address_text(environment.address, environment.port);
    if (said && said->first == Kind::welcome) return said->second;
    if (said && said->first == Kind::refusal) fail("%s: %s", where.c_str(), said->second.c_str());
    // Rank 0 has said why; where it is gone, one of us says so, unless its launcher does.
    if (said || environment.rank != 1 || environment.supervised) _exit(1);
    fail("%s: rank 0 ended while ranks met, or it is no rank 0 that listens there", where.c_str());
}

Meeting join_meeting(const RankEnvironment& environment, double timeout) {
    const size_t ranks = static_cast<size_t>(environment.ranks);
    Meeting meeting;
    meeting.values.assign(ranks, -1), meeting.signals.assign(ranks, -1);
    const double deadline = monotonic_seconds() + timeout;
    const auto introduce = [&](Channel channel) {
        const int socket = connect_to(environment.address, environment.port, deadline);
        const Hello hello = hello_of(environment, channel);
        send_all(socket, &hello, sizeof(hello));  // what became of it shows in the answer
        return socket;
    };
    meeting.values[0] = introduce(Channel::values);
    meeting.signals[0] = introduce(Channel::signals);
    const std::string leader = peer_address(meeting.values[0]);
    std::istringstream table(await_welcome(environment, meeting.values[0], timeout));
    await_welcome(environment, meeting.signals[0], timeout);
    int node = 0;
    for (std::string host, address; table >> node >> host >> address;) {
        meeting.nodes.push_back(node);
        meeting.hosts.push_back(host);
        meeting.addresses.push_back(address == "-" ? leader : address);
    }
    if (meeting.nodes.size() != ranks) fail("%s: no rank 0 of ours", leader.c_str());
    return meeting;
}

}  // namespace

bool accept_hellos(Door& door, double deadline, const std::function<bool(const Hello&, int)>& arrived) {
    while (monotonic_seconds() < deadline) {
        std::vector<pollfd> wait = {{door.listener, POLLIN, 0}};
        double next = deadline;
        for (const Newcomer& newcomer : door.newcomers) {
            wait.push_back({newcomer.socket, POLLIN, 0});
            next = std::min(next, newcomer.deadline);
        }
        poll_until(wait, next);
        for (size_t i = door.newcomers.size(); i-- > 0;) {
            const Reading reading = wait[i + 1].revents != 0 ? read_hello(door.newcomers[i]) : Reading::more;
            const Newcomer newcomer = door.newcomers[i];
            if (reading == Reading::more && monotonic_seconds() < newcomer.deadline) continue;
            door.newcomers.erase(door.newcomers.begin() + static_cast<ptrdiff_t>(i));
            if (reading != Reading::whole) {
                close(newcomer.socket);
            } else if (arrived(newcomer.hello, newcomer.socket)) {
                return true;
            }
        }
        for (int socket = -1; (socket = accept_connection(door.listener)) >= 0;)
            door.newcomers.push_back({socket, monotonic_seconds() + stranger_seconds});
    }
    return false;
}

void close_door(Door& door) {
    close(door.listener);
    for (const Newcomer& newcomer : door.newcomers) close(newcomer.socket);
    door = {-1};
}

Meeting meet(const RankEnvironment& environment, double timeout_seconds,
             void (*report)(const std::string& line)) {
    return environment.rank == 0 ? lead_meeting(environment, timeout_seconds, report)
                                 : join_meeting(environment, timeout_seconds);
}
