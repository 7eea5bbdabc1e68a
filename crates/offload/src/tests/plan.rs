//! When tensors go out and come back, case by case.

use shardwright_core::{MicrobatchId, Phase};

use crate::plan::{CallId, Order, Plan, Task, TensorId};

fn forward(microbatch: u32) -> Task {
    Task {
        phase: Phase::Forward,
        microbatch: MicrobatchId(microbatch),
    }
}

fn backward(microbatch: u32) -> Task {
    Task {
        phase: Phase::Backward,
        microbatch: MicrobatchId(microbatch),
    }
}

/// Does at once what a plan asks for; the loads and stores.
fn obey(plan: &mut Plan) -> (Vec<TensorId>, Vec<TensorId>) {
    let (mut loads, mut stores) = (Vec::new(), Vec::new());
    loop {
        let orders = plan.take_orders();
        if orders.is_empty() {
            return (loads, stores);
        }
        for order in orders {
            match order {
                Order::Store(tensor) => {
                    stores.push(tensor);
                    plan.stored(tensor);
                }
                Order::Load(tensor) => {
                    loads.push(tensor);
                    plan.loaded(tensor);
                }
                Order::Release(_) | Order::Erase(_) => {}
            }
        }
    }
}

/// Calls of a microbatch with a tensor each.
fn calls(plan: &mut Plan, microbatch: u32, number: usize) -> Vec<(CallId, TensorId)> {
    (0..number)
        .map(|_| {
            let call = plan.add_call(MicrobatchId(microbatch));
            (call, plan.add_tensor(call))
        })
        .collect()
}

#[test]
fn what_is_needed_within_the_horizon_never_goes_out() {
    let mut plan = Plan::new(2);
    plan.begin_step([forward(0), backward(0)]);
    plan.begin_task(forward(0));
    let made = calls(&mut plan, 0, 5);
    let (loads, stores) = obey(&mut plan);
    assert!(loads.is_empty());
    let out: Vec<_> = made[..3].iter().map(|(_, tensor)| *tensor).collect();
    assert_eq!(stores, out);
}

#[test]
fn tensors_come_back_one_after_another_in_the_reverse_order_of_their_forwards() {
    let mut plan = Plan::new(2);
    plan.begin_step([forward(0), backward(0)]);
    plan.begin_task(forward(0));
    let made = calls(&mut plan, 0, 5);
    obey(&mut plan);
    plan.begin_task(backward(0));
    let mut came = Vec::new();
    for (call, _) in made.iter().rev() {
        assert!(plan.is_ready(*call));
        plan.need(*call);
        let (loads, _) = obey(&mut plan);
        assert!(loads.len() <= 1);
        came.extend(loads);
        plan.has_used(*call);
        obey(&mut plan);
        plan.remove_call(*call);
        obey(&mut plan);
    }
    let expected: Vec<_> = made[..3].iter().rev().map(|(_, tensor)| *tensor).collect();
    assert_eq!(came, expected);
}

#[test]
fn forwards_that_come_first_count_as_tasks() {
    for (horizon, expected) in [(1, 0), (2, 0), (3, 1), (4, 2), (9, 3)] {
        let mut plan = Plan::new(horizon);
        plan.begin_step([forward(0), forward(1), forward(2), backward(0), backward(1)]);
        plan.begin_task(forward(0));
        let made = calls(&mut plan, 0, 3);
        obey(&mut plan);
        let inside = made.iter().filter(|(call, _)| plan.is_ready(*call));
        assert_eq!(inside.count(), expected, "horizon {horizon}");
        plan.begin_task(backward(0)); // the schedule has changed its mind
        obey(&mut plan);
        let inside = made.iter().filter(|(call, _)| plan.is_ready(*call));
        assert_eq!(inside.count(), 3.min(horizon as usize), "horizon {horizon}");
    }
}

#[test]
fn without_a_known_order_the_lowest_microbatch_comes_first() {
    let mut plan = Plan::new(3);
    plan.begin_step([]);
    let second = calls(&mut plan, 1, 2);
    let first = calls(&mut plan, 0, 2);
    obey(&mut plan);
    let inside = |(call, _): &(CallId, TensorId)| plan.is_ready(*call);
    assert!(first.iter().all(inside));
    assert_eq!([false, true], [inside(&second[0]), inside(&second[1])]);
}

#[test]
fn a_tensor_of_several_calls_stays_until_the_last_of_them_has_gone() {
    let mut plan = Plan::new(1);
    plan.begin_step([forward(0), backward(0)]);
    plan.begin_task(forward(0));
    let first = plan.add_call(MicrobatchId(0));
    let mask = plan.add_tensor(first);
    let others = calls(&mut plan, 0, 2);
    for (call, _) in &others {
        assert!(plan.share(*call, mask));
    }
    obey(&mut plan);
    plan.remove_call(first);
    plan.remove_call(others[0].0);
    assert!(plan.is_kept(mask));
    plan.remove_call(others[1].0);
    assert!(!plan.is_kept(mask));
    assert!(plan.take_orders().contains(&Order::Erase(mask)));
    assert!(!plan.share(first, mask));
}

#[test]
fn a_second_backward_through_the_same_graph_finds_its_tensors_again() {
    let mut plan = Plan::new(1);
    plan.begin_step([forward(0), backward(0)]);
    plan.begin_task(forward(0));
    let made = calls(&mut plan, 0, 3);
    obey(&mut plan);
    for _ in 0..2 {
        plan.need(made[0].0);
        obey(&mut plan);
        assert!(plan.is_ready(made[0].0));
        plan.has_used(made[0].0);
        obey(&mut plan);
    }
}
