#include "opapi/collective.h"

#include "hccl/exchange.h"

namespace softnpu {
namespace {

hccl::Comm& comm_of(const std::string& group) {
  hccl::Comm* comm = hccl::find(group);
  TORCH_CHECK(comm != nullptr, "softnpu: no communicator is called '", group,
              "' in this process; one is made by the group's first collective, or by get_hccl_comm_name");
  return *comm;
}

void exchange(hccl::Comm& comm, const void* send, std::vector<hccl::Segment> to, void* receive,
              std::vector<hccl::Segment> from) {
  hccl::Exchange x{"a collective inside an operator",
                   HCCL_CMD_ALLTOALLV,
                   HCCL_DATA_TYPE_UINT8,
                   send,
                   std::move(to),
                   receive,
                   std::move(from)};
  x.host = true;
  const HcclResult result = hccl::run(comm, x);
  TORCH_CHECK(result == HCCL_SUCCESS, aclGetRecentErrMsg());
}

// Row counts of what each rank sends here.
std::vector<int64_t> exchange_rows(hccl::Comm& comm, const std::vector<at::Tensor>& to) {
  std::vector<int64_t> out, in(to.size());
  std::vector<hccl::Segment> segments;
  for (const at::Tensor& t : to) {
    segments.push_back({out.size() * sizeof(int64_t), sizeof(int64_t)});
    out.push_back(t.size(0));
  }
  exchange(comm, out.data(), segments, in.data(), segments);
  return in;
}

}  // namespace

int64_t group_size(const std::string& group) { return comm_of(group).ranks(); }
int64_t group_rank(const std::string& group) { return comm_of(group).rank(); }

std::vector<at::Tensor> all_to_all(const std::string& group, const std::vector<at::Tensor>& to) {
  hccl::Comm& comm = comm_of(group);
  TORCH_CHECK(to.size() == comm.ranks(), "softnpu: all_to_all wants one tensor a rank, ", comm.ranks(), ", not ",
              to.size());
  const auto rows = exchange_rows(comm, to);
  const auto send = at::cat(to).contiguous();
  const auto row_shape = to[0].sizes().slice(1);
  std::vector<hccl::Segment> sent, received;
  std::vector<at::Tensor> result;
  const uint64_t row_bytes = c10::multiply_integers(row_shape) * send.element_size();
  std::vector<int64_t> shape = {0};
  shape.insert(shape.end(), row_shape.begin(), row_shape.end());
  for (const int64_t n : rows) shape[0] += n;
  const auto receive = at::empty(shape, send.options());
  uint64_t send_row = 0, receive_row = 0;
  for (size_t r = 0; r < to.size(); ++r) {
    sent.push_back({send_row * row_bytes, to[r].size(0) * row_bytes});
    received.push_back({receive_row * row_bytes, rows[r] * row_bytes});
    result.push_back(receive.narrow(0, static_cast<int64_t>(receive_row), rows[r]));
    send_row += to[r].size(0);
    receive_row += rows[r];
  }
  exchange(comm, send.data_ptr(), sent, receive.data_ptr(), received);
  return result;
}

}  // namespace softnpu
