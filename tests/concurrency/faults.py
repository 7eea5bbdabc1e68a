"""Faults of threads that meet: for each law one that it must catch. ``tests`` are the crate and the law."""

from __future__ import annotations

from tests.mutants.faults import Fault

_BUFFERS = "crates/buffers/src"
_COMM = "crates/comm/src"
_UCX = "crates/ucx/src"
_RUNTIME = "crates/runtime/src"
_OFFLOAD = "crates/offload/src"
#: Stands for the tests of raw memory under AddressSanitizer.
MEMORY = "memory"

FAULTS = (
    Fault(
        "offload",
        "who waits for a tensor is not told that it is back",
        f"{_OFFLOAD}/mover.rs",
        "self.obey(&mut state);\n        self.done.notify_all();",
        "self.obey(&mut state);",
        ("shardwright-offload", "what_is_given_to_the_thread_is_moved_and_comes_back_as_it_was"),
    ),
    Fault(
        "offload",
        "the thread is not told of what it has to store",
        f"{_OFFLOAD}/mover.rs",
        "state.stores.push_back(tensor);\n        self.work.notify_one();",
        "state.stores.push_back(tensor);",
        ("shardwright-offload", "what_is_given_to_the_thread_is_moved_and_comes_back_as_it_was"),
    ),
    Fault(
        "offload",
        "an end does not wake the thread",
        f"{_OFFLOAD}/shell.rs",
        "state.closed = true;\n        self.shared.work.notify_all();",
        "state.closed = true;",
        ("shardwright-offload", "an_end_wakes_who_waits_for_room_or_for_a_tensor"),
    ),
    Fault(
        "objects",
        "of two sleeping receivers the last one is not woken",
        f"{_COMM}/objects.rs",
        "let asleep = state.asleep > 0;",
        "let asleep = state.asleep > 1;",
        ("shardwright-comm", "every_object_wakes_its_receiver_and_objects_keep_their_order"),
    ),
    Fault(
        "objects",
        "who waits is not told of a lost peer",
        f"{_COMM}/objects.rs",
        "state.lost.entry(rank).or_insert(loss);\n        self.wake(state);",
        "state.lost.entry(rank).or_insert(loss);",
        ("shardwright-comm", "every_waiting_receiver_hears_of_the_end_whatever_it_is"),
    ),
    Fault(
        "objects",
        "a barrier opens before its last member is there",
        f"{_COMM}/objects.rs",
        "    for rank in others() {\n        if let Err(error)",
        "    for rank in others().skip(1) {\n        if let Err(error)",
        ("shardwright-comm", "nobody_passes_a_barrier_before_all_have_reached_it"),
    ),
    Fault(
        "objects",
        "members of a failed barrier are not told",
        f"{_COMM}/objects.rs",
        "            for rank in others() {\n                // A member",
        "            for rank in others().skip(2) {\n                // A member",
        ("shardwright-comm", "nobody_hangs_at_a_barrier_that_a_rank_does_not_reach"),
    ),
    Fault(
        "objects",
        "a receiver that reads is not woken by who delivers for it",
        f"{_COMM}/objects.rs",
        "if reads && let Some(transport)",
        "if reads && asleep && let Some(transport)",
        ("shardwright-comm", "a_receiver_that_reads_is_woken_by_its_object_whoever_delivers_it"),
    ),
    Fault(
        "objects",
        "a receiver that reads does not hear of the end",
        f"{_COMM}/objects.rs",
        "any(|thread| *thread != this)",
        "any(|thread| *thread == this)",
        ("shardwright-comm", "a_receiver_that_reads_hears_of_the_end_whatever_it_is"),
    ),
    Fault(
        "router",
        "what comes while a handler is set overtakes what was kept for it",
        f"{_COMM}/router.rs",
        "        let mut state = self.lock();\n        while let",
        "        self.lock().handler = Some(Arc::clone(&handler));\n"
        "        let mut state = self.lock();\n        while let",
        ("shardwright-comm", "a_late_handler_hears_all_of_each_peer_in_order_and_its_loss_last"),
    ),
    Fault(
        "router",
        "what is published for a peer that is gone is kept",
        f"{_COMM}/published.rs",
        "peers.retain(|rank| !state.lost.contains(rank));",
        "",
        ("shardwright-comm", "what_is_published_is_kept_for_nobody_who_is_gone"),
    ),
    Fault(
        "buffers",
        "a block is taken back before its receiver has it",
        f"{_BUFFERS}/pool.rs",
        "load(Ordering::Acquire) == slot::FREE",
        "load(Ordering::Acquire) != slot::TAKEN",
        ("shardwright-buffers", "no_two_holders_have_a_block_and_all_blocks_come_back"),
    ),
    Fault(
        "buffers",
        "a block is lent that another thread reads",
        f"{_BUFFERS}/pool.rs",
        "Arc::strong_count(&region) > 2",
        "Arc::strong_count(&region) > 3",
        ("shardwright-buffers", "a_block_that_another_thread_of_its_rank_still_reads_is_not_lent"),
    ),
    Fault(
        "buffers",
        "a place is taken without a look whether it is lent",
        f"{_BUFFERS}/import.rs",
        ".compare_exchange(slot::LENT, slot::TAKEN,",
        ".compare_exchange(self.mapping.word(slot_word).load(Ordering::Acquire), slot::TAKEN,",
        ("shardwright-buffers", "a_place_is_taken_once"),
    ),
    Fault(
        "ucx",
        "the reading thread takes the signal that was to wake a waiting one",
        f"{_COMM}/ucx/reading.rs",
        "                self.wake_reader();\n                settled",
        "                settled",
        ("shardwright-comm", "a_message_is_read_whoever_waits_and_after_nobody_does"),
    ),
    Fault(
        "ucx",
        "a message that came while the lock of deliveries was held for something else stays",
        f"{_COMM}/ucx/reading.rs",
        "        self.deliver();\n        condemned",
        "        condemned",
        ("shardwright-comm", "what_a_sending_thread_finds_reaches_those_who_wait"),
    ),
    Fault(
        "memory",
        "the end of an operation leaves its address among those under way",
        f"{_UCX}/raw/callback_state.rs",
        "slots.places[operation.place] = null_mut();",
        "",
        ("shardwright-comm", MEMORY),
    ),
    Fault(
        "server",
        "a worker does not look again for its turn after others came in",
        f"{_RUNTIME}/waiting.rs",
        "            state = self.settle(state);\n"
        "            if let Some(grant) = state.machine.take_grant(worker) {\n"
        "                return (grant, state);\n"
        "            }\n",
        "            state = self.settle(state);\n",
        ("shardwright-runtime", "every_wait_ends_and_one_thread_has_the_turn"),
    ),
    Fault(
        "server",
        "a worker that receives is not woken by who gives it the turn",
        f"{_RUNTIME}/server.rs",
        "reader == worker && thread != thread::current().id()",
        "reader == worker && thread == thread::current().id()",
        ("shardwright-runtime", "every_wait_ends_where_workers_receive_by_themselves"),
    ),
    Fault(
        "server",
        "others come in between the main thread's look and its sleep",
        f"{_RUNTIME}/server.rs",
        "                return None;\n            }\n            state = wait_on(&self.main_condvar, state, left);",
        "                return None;\n            }\n            drop(state);\n"
        "            state = wait_on(&self.main_condvar, self.lock(), left);",
        ("shardwright-runtime", "one_failure_reaches_every_waiter_and_the_next_step_runs"),
    ),
    Fault(
        "server",
        "a worker that has received until it has the turn sleeps",
        f"{_RUNTIME}/waiting.rs",
        "if read || state.machine.has_grant(worker)",
        "if state.machine.has_grant(worker) && false",
        ("shardwright-runtime", "one_failure_reaches_every_waiter_that_receives_by_itself"),
    ),
    Fault(
        "server",
        "the main thread is not woken by a thread that has sent",
        f"{_RUNTIME}/server.rs",
        "            if wake_main {\n                self.main_condvar",
        "            if wake_main && sent.is_empty() {\n                self.main_condvar",
        ("shardwright-runtime", "a_lost_peer_ends_the_steps_of_all_whenever_it_is_lost"),
    ),
    Fault(
        "server",
        "an answer comes between the main thread's look and its sleep",
        f"{_RUNTIME}/server/calls.rs",
        "state = wait_on(&self.main_condvar, state, left);",
        "drop(state);\n            state = wait_on(&self.main_condvar, self.lock(), left);",
        ("shardwright-runtime", "a_waiting_main_thread_hears_its_answer_and_control_requests_go_first"),
    ),
    Fault(
        "outbox",
        "a message overtakes another thread's",
        f"{_RUNTIME}/outbox.rs",
        ".partition(|(to, _)| self.sending_to.contains(to));",
        ".partition(|(to, _)| self.sending_to.contains(to) && to.0 == u32::MAX);",
        ("shardwright-runtime", "threads_that_send_to_one_rank_do_not_overtake_each_other"),
    ),
    Fault(
        "outbox",
        "what a thread is sending counts as sent",
        f"{_RUNTIME}/outbox.rs",
        "self.waiting.is_empty() && self.sending_to.is_empty()",
        "self.waiting.is_empty()",
        ("shardwright-runtime", "a_server_that_closes_has_sent_all_that_was_decided"),
    ),
)
