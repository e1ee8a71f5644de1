// Checked TCP sockets over IPv4 and IPv6. All are closed on exec and raise no SIGPIPE; connections send small
// messages at once. Times are seconds of monotonic_seconds(), deadlines too; INFINITY is none.
#pragma once

#include <poll.h>

#include <cstddef>
#include <string>
#include <vector>

double monotonic_seconds();

// "10.0.0.1:29500", "[::1]:29500": for messages.
std::string address_text(const std::string& address, int port);

// A socket that listens: on a loopback address (127.*, ::1, localhost) for this machine alone, else on every
// address of this machine. Port 0 is any free one. Fails naming address and port, say where they are in use.
int listen_at(const std::string& address, int port);
int listening_port(int listener);
// The next connection, or -1 where none waits any more.
int accept_connection(int listener);

// Connects, trying again until the deadline, since the other end may not be up yet. Fails naming address and
// port, with the last reason.
int connect_to(const std::string& address, int port, double deadline);
// The other end's numeric address.
std::string peer_address(int socket);
bool is_loopback(const std::string& address);

void set_nonblocking(int socket);

// Waits for events; returns at the deadline too. Interrupted waits go on.
void poll_until(std::vector<pollfd>& sockets, double deadline);

// All of the bytes, waiting as long as it takes, or until the deadline. False where the other end is gone or
// the deadline has passed.
bool send_all(int socket, const void* bytes, size_t n);
bool receive_all(int socket, void* bytes, size_t n, double deadline);
