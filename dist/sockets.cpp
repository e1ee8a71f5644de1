// Checked TCP sockets; see sockets.h.
#include "dist/sockets.h"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cmath>
#include <cstring>
#include <memory>
#include <thread>

#include "kernels/error.h"

namespace {

constexpr int backlog = 1024;  // of connections that are not accepted yet: every rank may come at once
constexpr double retry_seconds = 0.05;
constexpr double attempt_seconds = 5;  // of one attempt to connect, where nothing answers

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Resolves a name; on failure null, with the reason.
Addresses resolve(const std::string& address, int port, std::string& reason) {
    addrinfo hints = {}, *found = nullptr;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = AI_NUMERICSERV;
    const int error = getaddrinfo(address.c_str(), std::to_string(port).c_str(), &hints, &found);
    if (error != 0) {
        reason = error == EAI_SYSTEM ? strerror(errno) : gai_strerror(error);
        found = nullptr;
    }
    return Addresses(found, freeaddrinfo);
}

int open_socket(int family) { return socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0); }

void send_at_once(int socket) {
    const int on = 1;
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// Listens, or closes the socket and says in errno why not.
bool listen_on(int socket, const sockaddr* address, socklen_t length) {
    const int on = 1;
    setsockopt(socket, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
    if (bind(socket, address, length) == 0 && listen(socket, backlog) == 0) {
        set_nonblocking(socket);  // a connection may be gone before it is accepted
        return true;
    }
    const int reason = errno;
    close(socket);
    errno = reason;
    return false;
}

int listen_on_loopback(const std::string& address, int port) {
    std::string reason;
    const Addresses found = resolve(address, port, reason);
    if (!found) fail("%s: %s", address_text(address, port).c_str(), reason.c_str());
    for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
        const int socket = open_socket(a->ai_family);
        if (socket >= 0 && listen_on(socket, a->ai_addr, a->ai_addrlen)) return socket;
    }
    return -1;
}

int listen_on_every_address(int port) {
    sockaddr_in6 any6 = {};
    any6.sin6_family = AF_INET6;
    any6.sin6_addr = in6addr_any;
    any6.sin6_port = htons(static_cast<uint16_t>(port));
    int socket = open_socket(AF_INET6);
    if (socket >= 0) {
        const int off = 0;  // IPv4 as well
        setsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
        if (listen_on(socket, reinterpret_cast<sockaddr*>(&any6), sizeof(any6))) return socket;
        if (errno == EADDRINUSE) return -1;
    }
    // IPv6 may be off.
    sockaddr_in any = {};
    any.sin_family = AF_INET;
    any.sin_port = htons(static_cast<uint16_t>(port));
    socket = open_socket(AF_INET);
    return socket >= 0 && listen_on(socket, reinterpret_cast<sockaddr*>(&any), sizeof(any)) ? socket : -1;
}

// A port of this machine's own range can be given to the very socket that connects to it: TCP then connects
// it with itself.
bool connected_to_itself(int socket) {
    sockaddr_storage local = {}, peer = {};
    socklen_t local_length = sizeof(local), peer_length = sizeof(peer);
    getsockname(socket, reinterpret_cast<sockaddr*>(&local), &local_length);
    getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &peer_length);
    return local_length == peer_length && memcmp(&local, &peer, local_length) == 0;
}

// One attempt; -1 with errno where it failed.
int try_to_connect(const addrinfo& address, double deadline) {
    const int socket = open_socket(address.ai_family);
    if (socket < 0) return -1;
    const int flags = fcntl(socket, F_GETFL);
    set_nonblocking(socket);
    int reason = 0;
    if (connect(socket, address.ai_addr, address.ai_addrlen) != 0) {
        reason = errno;
        if (reason == EINPROGRESS) {
            std::vector<pollfd> wait = {{socket, POLLOUT, 0}};
            poll_until(wait, std::min(deadline, monotonic_seconds() + attempt_seconds));
            socklen_t length = sizeof(reason);
            if (wait[0].revents == 0) {
                reason = ETIMEDOUT;
            } else {
                getsockopt(socket, SOL_SOCKET, SO_ERROR, &reason, &length);
            }
        }
    }
    if (reason == 0 && connected_to_itself(socket)) reason = ECONNREFUSED;
    if (reason != 0) {
        close(socket);
        errno = reason;
        return -1;
    }
    fcntl(socket, F_SETFL, flags);
    send_at_once(socket);
    return socket;
}

}  // namespace

double monotonic_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

std::string address_text(const std::string& address, int port) {
    const bool v6 = address.find(':') != std::string::npos;
    return (v6 ? "[" + address + "]" : address) + ":" + std::to_string(port);
}

bool is_loopback(const std::string& address) {
    return address == "localhost" || address == "::1" || address.starts_with("127.") ||
           address.starts_with("::ffff:127.");
}

int listen_at(const std::string& address, int port) {
    const int listener =
        is_loopback(address) ? listen_on_loopback(address, port) : listen_on_every_address(port);
    if (listener < 0) fail("%s: cannot listen: %s", address_text(address, port).c_str(), strerror(errno));
    return listener;
}

int listening_port(int listener) {
    sockaddr_storage local = {};
    socklen_t length = sizeof(local);
    if (getsockname(listener, reinterpret_cast<sockaddr*>(&local), &length) != 0)
        fail("no listening socket: %s", strerror(errno));
    return ntohs(local.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&local)->sin6_port
                                             : reinterpret_cast<sockaddr_in*>(&local)->sin_port);
}

int accept_connection(int listener) {
    const int socket = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket >= 0) {
        send_at_once(socket);
    } else if (errno == EMFILE || errno == ENFILE) {
        fail("cannot accept a connection: %s (ulimit -n)", strerror(errno));
    }
    return socket;
}

int connect_to(const std::string& address, int port, double deadline) {
    std::string reason;
    for (;;) {
        const Addresses found = resolve(address, port, reason);
        for (const addrinfo* a = found.get(); a != nullptr; a = a->ai_next) {
            const int socket = try_to_connect(*a, deadline);
            if (socket >= 0) return socket;
            reason = strerror(errno);
        }
        if (monotonic_seconds() >= deadline)
            fail("%s: cannot connect: %s", address_text(address, port).c_str(), reason.c_str());
        std::this_thread::sleep_for(std::chrono::duration<double>(retry_seconds));
    }
}

std::string peer_address(int socket) {
    sockaddr_storage peer = {};
    socklen_t length = sizeof(peer);
    char host[NI_MAXHOST] = "";
    if (getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &length) == 0)
        getnameinfo(reinterpret_cast<sockaddr*>(&peer), length, host, sizeof(host), nullptr, 0,
                    NI_NUMERICHOST);
    return host;
}

void set_nonblocking(int socket) { fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK); }

void poll_until(std::vector<pollfd>& sockets, double deadline) {
    for (;;) {
        const double left = deadline - monotonic_seconds();
        const int milliseconds = std::isinf(left) ? -1
                                 : left <= 0      ? 0
                                                  : static_cast<int>(std::min(std::ceil(left * 1e3), 1e9));
        const int ready = poll(sockets.data(), sockets.size(), milliseconds);
        if (ready > 0 || (ready == 0 && left <= 0)) return;
        if (ready < 0 && errno != EINTR) fail("cannot wait for connections: %s", strerror(errno));
    }
}

bool send_all(int socket, const void* bytes, size_t n) {
    const char* at = static_cast<const char*>(bytes);
    while (n > 0) {
        const ssize_t sent = send(socket, at, n, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        at += sent, n -= static_cast<size_t>(sent);
    }
    return true;
}

bool receive_all(int socket, void* bytes, size_t n, double deadline) {
    char* at = static_cast<char*>(bytes);
    while (n > 0) {
        if (!std::isinf(deadline)) {
            std::vector<pollfd> wait = {{socket, POLLIN, 0}};
            poll_until(wait, deadline);
            if (wait[0].revents == 0) return false;
        }
        const ssize_t received = recv(socket, at, n, 0);
        if (received < 0 && errno == EINTR) continue;
        if (received <= 0) return false;
        at += received, n -= static_cast<size_t>(received);
    }
    return true;
}
