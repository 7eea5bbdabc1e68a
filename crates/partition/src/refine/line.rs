//! A microbatch's forward as a line of stretches, and for given places as a chain of segments.

use std::time::Duration;

use shardwright_core::PipelineRank;
use shardwright_simulate::StageCosts;

use crate::measured::Measured;
use crate::node::{NodeId, Tree};
use crate::request::PartitionRequest;

/// What a call to another rank takes of each of the two ranks, beside its tensors.
const CALL: Duration = Duration::from_micros(100);
/// How long a message is under way.
pub(super) const LATENCY: Duration = Duration::from_micros(100);
/// Bytes that the two ranks together move in a nanosecond (2 GB/s): each spends half of the time.
const BYTES_PER_NANOSECOND: u64 = 2;

/// A part of the forward that stays on one rank wherever nodes go.
#[derive(Clone, Debug)]
pub(super) struct Stretch {
    pub(super) node: NodeId,
    pub(super) forward: Duration,
    input_gradient: Duration,
    weight_gradient: Duration,
    /// Bytes that pass from the stretch before to this one.
    bytes: u64,
    /// Whether it is an `nn.Sequential` between two of its children, which pass their results
    /// straight on, so that it runs where the first of them does.
    passes: bool,
}

/// All stretches in order. A backward takes twice as long as its forward; where the module holds
/// parameters, half of that is for their gradients.
#[derive(Clone, Debug)]
pub(super) struct StretchSequence {
    pub(super) stretches: Vec<Stretch>,
}

/// The segments of a line on given places.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Segments {
    pub(super) ranks: Vec<PipelineRank>,
    pub(super) costs: Vec<StageCosts>,
}

impl StretchSequence {
    /// Of a measured forward. `follows` says which modules run wherever they are called.
    pub(super) fn new(
        request: &PartitionRequest,
        measured: &Measured,
        tree: &Tree,
        follows: &[bool],
    ) -> Self {
        let executions = &measured.executions;
        // Who an execution runs with: itself, or whoever called it.
        let mut anchors: Vec<usize> = Vec::with_capacity(executions.len());
        for (number, execution) in executions.iter().enumerate() {
            let with = match execution.caller {
                Some(caller) if follows[execution.module.0 as usize] => anchors[caller as usize],
                _ => number,
            };
            anchors.push(with);
        }
        let mut stretches: Vec<Stretch> = Vec::new();
        let mut of_stretch: Vec<usize> = Vec::new();
        let mut before: Option<u32> = None;
        for piece in &measured.pieces {
            let execution = &executions[piece.execution as usize];
            let anchor = anchors[piece.execution as usize];
            if of_stretch.last() != Some(&anchor) {
                let bytes = match before {
                    None => 0,
                    Some(before) if execution.caller == Some(before) => execution.argument_bytes,
                    Some(before) => executions[before as usize].result_bytes,
                };
                of_stretch.push(anchor);
                stretches.push(Stretch {
                    node: tree.node_of[executions[anchor].module.0 as usize],
                    forward: Duration::ZERO,
                    input_gradient: Duration::ZERO,
                    weight_gradient: Duration::ZERO,
                    bytes,
                    passes: false,
                });
            }
            let stretch = stretches.last_mut().expect("one was just pushed");
            let forward = Duration::from_secs_f64(piece.seconds);
            stretch.forward += forward;
            stretch.input_gradient += forward;
            let module = &request.modules[execution.module.0 as usize];
            if module.parameters.is_empty() {
                stretch.input_gradient += forward;
            } else {
                stretch.weight_gradient += forward;
            }
            before = Some(piece.execution);
        }
        mark_passes(request, measured, &of_stretch, &mut stretches);
        Self { stretches }
    }

    /// The segments where each node is on the rank given by its number.
    pub(super) fn segments(&self, ranks: &[PipelineRank]) -> Segments {
        let rank_of = |stretch: &Stretch| ranks[stretch.node.index()];
        // The step function calls the model.
        let mut segments = Segments {
            ranks: vec![PipelineRank(0)],
            costs: vec![StageCosts::default()],
        };
        for (number, stretch) in self.stretches.iter().enumerate() {
            let last = *segments.ranks.last().expect("there is a first");
            let cost = segments.costs.last_mut().expect("there is a first");
            let mut rank = rank_of(stretch);
            let next = self.stretches.get(number + 1).map(rank_of);
            if stretch.passes && rank != last && next.is_some_and(|next| next != rank) {
                rank = last;
            }
            if rank != last {
                let call = CALL + Duration::from_nanos(stretch.bytes / BYTES_PER_NANOSECOND / 2);
                add(cost, call, call, Duration::ZERO);
                let mut cost = StageCosts::default();
                add(&mut cost, call, call, Duration::ZERO);
                segments.ranks.push(rank);
                segments.costs.push(cost);
            }
            let cost = segments.costs.last_mut().expect("there is a first");
            add(
                cost,
                stretch.forward,
                stretch.input_gradient,
                stretch.weight_gradient,
            );
        }
        segments
    }
}

fn add(cost: &mut StageCosts, forward: Duration, input: Duration, weight: Duration) {
    cost.forward += forward;
    cost.full_backward += input + weight;
    cost.input_gradient += input;
    cost.weight_gradient += weight;
}

fn mark_passes(
    request: &PartitionRequest,
    measured: &Measured,
    of_stretch: &[usize],
    stretches: &mut [Stretch],
) {
    let mut first = vec![None; measured.executions.len()];
    let mut last = vec![None; measured.executions.len()];
    for (number, &execution) in of_stretch.iter().enumerate() {
        first[execution].get_or_insert(number);
        last[execution] = Some(number);
    }
    for (number, (stretch, &execution)) in stretches.iter_mut().zip(of_stretch).enumerate() {
        let module = &request.modules[measured.executions[execution].module.0 as usize];
        let inside = first[execution] != Some(number) && last[execution] != Some(number);
        stretch.passes = inside && module.class_name == "Sequential";
    }
}

#[cfg(test)]
mod tests {
    use shardwright_core::ModuleId;

    use super::*;
    use crate::measured::{Execution, ModuleInterval};

    /// A module of `class_name` with three layers that hold a parameter each, 1 ms a piece.
    fn line(class_name: &str, bytes: u64) -> StretchSequence {
        let layer = |number: usize| {
            format!(
                r#"{{"name": "{number}", "class_name": "Linear", "parents": [0], "parameters": [{number}]}}"#
            )
        };
        let parameter =
            |number: usize| format!(r#"{{"names": ["{number}"], "bytes": 4, "numel": 1}}"#);
        let text = format!(
            r#"{{"format_version": 2, "num_devices": 3, "alpha": 0.8, "auto": true,
                "modules": [{{"name": "", "class_name": "{class_name}"}}, {}, {}, {}],
                "parameters": [{}, {}, {}]}}"#,
            layer(0),
            layer(1),
            layer(2),
            parameter(0),
            parameter(1),
            parameter(2)
        );
        let request = PartitionRequest::from_json(&text).expect("a good request");
        let execution = |module: u32, caller: Option<u32>| Execution {
            module: ModuleId(module),
            caller,
            argument_bytes: bytes,
            result_bytes: bytes,
        };
        let order = [0, 1, 2, 1, 3, 1, 4, 1, 0];
        let measured = Measured {
            schedule: "simple".to_owned(),
            num_microbatches: std::num::NonZeroU32::MIN,
            executions: vec![
                execution(0, None),
                execution(0, Some(0)),
                execution(1, Some(1)),
                execution(2, Some(1)),
                execution(3, Some(1)),
            ],
            pieces: order
                .iter()
                .map(|&execution| ModuleInterval {
                    execution,
                    seconds: 0.001,
                })
                .collect(),
            undivided: Vec::new(),
        };
        let tree = Tree::new(&request);
        StretchSequence::new(&request, &measured, &tree, &[false; 4])
    }

    fn ranks(segments: &Segments) -> Vec<u32> {
        segments.ranks.iter().map(|rank| rank.0).collect()
    }

    const PLACES: [PipelineRank; 4] = [
        PipelineRank(0),
        PipelineRank(0),
        PipelineRank(1),
        PipelineRank(2),
    ];

    #[test]
    fn control_passes_through_a_caller_but_not_through_a_sequential() {
        assert_eq!(ranks(&line("Net", 0).segments(&PLACES)), [0, 1, 0, 2, 0]);
        let segments = line("Sequential", 0).segments(&PLACES);
        assert_eq!(ranks(&segments), [0, 1, 2, 0]);
        // What the Sequential does between its children, it does where it is.
        let millisecond = Duration::from_millis(1);
        let forwards: Duration = segments.costs.iter().map(|cost| cost.forward).sum();
        assert_eq!(forwards, 9 * millisecond + 6 * CALL);
    }

    #[test]
    fn one_rank_is_one_segment_and_weights_take_a_third_of_a_layer() {
        let segments = line("Net", 1000).segments(&[PipelineRank(0); 4]);
        assert_eq!(ranks(&segments), [0]);
        let millisecond = Duration::from_millis(1);
        assert_eq!(segments.costs[0].forward, 9 * millisecond);
        assert_eq!(segments.costs[0].full_backward, 18 * millisecond);
        assert_eq!(segments.costs[0].weight_gradient, 3 * millisecond);
        assert_eq!(segments.costs[0].input_gradient, 15 * millisecond);
    }

    #[test]
    fn both_ranks_pay_for_a_call_and_for_its_bytes() {
        let free = line("Net", 0).segments(&PLACES);
        let heavy = line("Net", 4_000_000).segments(&PLACES);
        let millisecond = Duration::from_millis(1);
        // 4 MB in 2 ms, half of it on each side: the first segment has one end, the second two.
        assert_eq!(heavy.costs[0].forward, free.costs[0].forward + millisecond);
        let second = free.costs[1].forward + 2 * millisecond;
        assert_eq!(heavy.costs[1].forward, second);
        assert_eq!(free.costs[1].forward, millisecond + 2 * CALL);
    }
}
