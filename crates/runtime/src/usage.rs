//! Where a rank's time inside steps goes, added up as it passes.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use shardwright_core::Rank;
use shardwright_wire::Phase;

use crate::trace::TraceKind;

/// A rank's time inside steps, and what travelled. All times but `sending` exclude one another.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Usage {
    /// Steps that ended well. Those that divided a model over ranks are not counted here.
    pub steps: u64,
    /// In forward work.
    pub forward: Duration,
    /// In backward work.
    pub backward: Duration,
    /// In gradients of weights that were run apart.
    pub weight: Duration,
    /// In other tasks.
    pub other: Duration,
    /// Nothing could run: by the rank whose message ended the wait.
    pub waiting: BTreeMap<Rank, Duration>,
    /// Nothing ran although something could, or nobody was waited for: threads that start, the step's result.
    pub overhead: Duration,
    /// Gradients were finished, and averaged over data-parallel ranks.
    pub commit: Duration,
    /// Of all the above: messages were handed to the transport.
    pub sending: Duration,
    /// Bytes of tensors in requests and answers sent.
    pub sent_bytes: u64,
    /// Bytes of tensors in requests and answers received.
    pub received_bytes: u64,
    /// How long the schedules would have idled under even costs; none where that is not known of every step.
    pub ideal_idle: Option<Duration>,
}

impl Usage {
    /// Time in which a task ran.
    pub fn busy(&self) -> Duration {
        self.forward + self.backward + self.weight + self.other
    }

    /// Time in which nothing could run.
    pub fn waited(&self) -> Duration {
        self.waiting.values().sum()
    }

    /// From the beginning of the tasks to their end.
    pub fn tasks(&self) -> Duration {
        self.busy() + self.waited() + self.overhead
    }

    /// All of it.
    pub fn total(&self) -> Duration {
        self.tasks() + self.commit
    }

    /// The part of the tasks' time in which no task ran.
    pub fn bubble(&self) -> f64 {
        share(self.waited() + self.overhead, self.tasks())
    }

    /// What the schedules' bubble would have been under even costs, if that is known.
    pub fn ideal_bubble(&self) -> Option<f64> {
        self.ideal_idle.map(|idle| share(idle, self.tasks()))
    }

    /// A task of this kind had the turn for so long.
    pub(crate) fn ran(&mut self, kind: TraceKind, phase: Phase, time: Duration) {
        let sum = match (kind, phase) {
            (TraceKind::WeightGradient, _) => &mut self.weight,
            (TraceKind::Root | TraceKind::Forward | TraceKind::Backward, Phase::Forward) => {
                &mut self.forward
            }
            (TraceKind::Root | TraceKind::Forward | TraceKind::Backward, Phase::Backward) => {
                &mut self.backward
            }
            (
                TraceKind::Close
                | TraceKind::Wait
                | TraceKind::Send
                | TraceKind::Receive
                | TraceKind::Recompute,
                _,
            ) => &mut self.other,
        };
        *sum += time;
    }

    /// Adds a step that has ended. `ideal` is its schedule's bubble.
    pub(crate) fn add(&mut self, step: &Self, ideal: Option<f64>) {
        let step_ideal = ideal.map(|ideal| step.tasks().mul_f64(ideal.clamp(0.0, 1.0)));
        let so_far = if self.steps == 0 {
            Some(Duration::ZERO)
        } else {
            self.ideal_idle
        };
        self.ideal_idle = so_far.zip(step_ideal).map(|(so_far, step)| so_far + step);
        self.steps += 1;
        self.forward += step.forward;
        self.backward += step.backward;
        self.weight += step.weight;
        self.other += step.other;
        for (rank, time) in &step.waiting {
            *self.waiting.entry(*rank).or_default() += *time;
        }
        self.overhead += step.overhead;
        self.commit += step.commit;
        self.sending += step.sending;
        self.sent_bytes += step.sent_bytes;
        self.received_bytes += step.received_bytes;
    }
}

fn share(part: Duration, whole: Duration) -> f64 {
    if whole.is_zero() {
        0.0
    } else {
        part.as_secs_f64() / whole.as_secs_f64()
    }
}

/// One line, in shares of the time inside steps.
impl fmt::Display for Usage {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = self.total();
        let percent = |time: Duration| format!("{:.1}%", 100.0 * share(time, total));
        let list = |parts: Vec<(String, Duration)>| {
            let named = parts.into_iter().filter(|(_, time)| !time.is_zero());
            let named: Vec<_> = named
                .map(|(name, time)| format!("{name} {}", percent(time)))
                .collect();
            if named.is_empty() {
                String::new()
            } else {
                format!(" ({})", named.join(", "))
            }
        };
        let tasks = [
            ("forward", self.forward),
            ("backward", self.backward),
            ("weight gradients", self.weight),
            ("other", self.other),
        ];
        let tasks = tasks.map(|(name, time)| (name.to_owned(), time)).into();
        let ranks = self.waiting.iter();
        let ranks = ranks.map(|(rank, time)| (format!("for rank {rank}"), *time));
        write!(
            formatter,
            "{} steps in {:.1} s: busy {}{}, waiting {}{}, overhead {}, finishing gradients {}; sending {}, {} bytes \
             sent, {} received; bubble {:.1}%",
            self.steps,
            total.as_secs_f64(),
            percent(self.busy()),
            list(tasks),
            percent(self.waited()),
            list(ranks.collect()),
            percent(self.overhead),
            percent(self.commit),
            percent(self.sending),
            self.sent_bytes,
            self.received_bytes,
            100.0 * self.bubble(),
        )?;
        match self.ideal_bubble() {
            Some(ideal) => write!(formatter, " (the schedule's ideal {:.1}%)", 100.0 * ideal),
            None => Ok(()),
        }
    }
}
