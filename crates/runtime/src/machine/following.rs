//! The machine under a list or a program: what it tells them, and what it asks.

use std::time::Duration;

use shardwright_core::{MicrobatchId, PipelineRank, RequestId, WorkerId};
use shardwright_schedule::{Progress, Ready, ReadyKind, Schedule, StagePart};

use super::dispatch::{ReadyItem, Subject, Turn};
use super::order::{Order, Standing, choose};
use super::requests::About;
use super::{Machine, Stage};
use crate::failure::{FailureKind, ServerError};
use crate::trace::TraceKind;

impl Machine {
    /// What this step's schedule names for this rank.
    pub(super) fn begin_order(&mut self) {
        self.returned.clear();
        self.order = None;
        if let Schedule::Program(program) = &self.plan.schedule {
            let place = self
                .config
                .pipeline
                .iter()
                .position(|rank| *rank == self.config.rank);
            let rank = PipelineRank(place.expect("a rank is in its pipeline") as u32);
            self.order = Some(Order::new(program, rank));
        }
    }

    /// The index of the ready item that runs next.
    pub(super) fn choose(&mut self) -> Option<usize> {
        self.go_on();
        if self.leader().is_some() {
            return self.choose_as_told();
        }
        let chosen = if self.order.is_some() {
            if let Some(rest) = self.next_of_rest() {
                return Some(rest);
            }
            choose(&self.standings())
        } else {
            let items = self.eligible().map(|(_, item)| &item.ready);
            self.plan.schedule.choose(items, &self.progress())
        };
        self.eligible().nth(chosen?).map(|(index, _)| index)
    }

    /// The next of what is left of a step that is over at its root: weights' gradients, in the program's order.
    fn next_of_rest(&self) -> Option<usize> {
        let order = self.order.as_ref().filter(|_| self.end_body.is_some())?;
        let items = || self.ready.iter().enumerate();
        if items().any(|(_, item)| item.ready.kind != ReadyKind::WeightGradient) {
            return None;
        }
        let place = |item: &ReadyItem| order.place(self.unit_of(&item.ready, &item.subject)?);
        items()
            .min_by_key(|(_, item)| place(item).unwrap_or(usize::MAX))
            .map(|(index, _)| index)
    }

    /// Whether the schedule would choose an item that became ready now before all that are ready.
    pub(super) fn goes_first(
        &mut self,
        worker: WorkerId,
        kind: ReadyKind,
        microbatch: MicrobatchId,
    ) -> bool {
        if self.leader().is_some() {
            return self.is_told_to_go_on(worker);
        }
        let own = Ready {
            kind,
            microbatch,
            arrival: self.arrivals + 1,
            visit: self.turns.visit(kind, microbatch),
        };
        let choice = if self.order.is_some() {
            self.go_on();
            let standing = self.standing_of(&own, &Subject::Worker(worker));
            let mut items = self.standings();
            items.push((own, standing));
            choose(&items)
        } else {
            let others = self.eligible().map(|(_, item)| &item.ready);
            let items = others.chain(std::iter::once(&own));
            self.plan.schedule.choose(items, &self.progress())
        };
        choice == Some(self.eligible().count())
    }

    /// A worker keeps the turn, whose wait was over at once. It counts as a new one, as if it had come a moment later.
    pub(super) fn continues(
        &mut self,
        worker: WorkerId,
        kind: ReadyKind,
        microbatch: MicrobatchId,
    ) {
        let ready = Ready {
            kind,
            microbatch,
            arrival: 0,
            visit: 0,
        };
        self.turns.begin(kind, microbatch);
        if self.has_peers() {
            self.tell_turn(self.name_of(&Subject::Worker(worker), microbatch));
        }
        let unit = self.unit_of(&ready, &Subject::Worker(worker));
        if let Some(order) = &mut self.order {
            order.grants(unit, None);
        }
    }

    /// Which entry of a list comes next.
    pub(super) fn listed(&self, progress: &Progress) -> usize {
        match &self.plan.schedule {
            Schedule::List(order) => order.pass_over(progress.listed, |microbatch| {
                self.returned.contains(&microbatch)
            }),
            _ => progress.listed,
        }
    }

    /// A ready item has the turn.
    pub(super) fn follows(&mut self, index: usize) {
        if self.has_peers() {
            let item = &self.ready[index];
            self.tell_turn(self.name_of(&item.subject, item.ready.microbatch));
        }
        let item = &self.ready[index];
        self.turns.begin(item.ready.kind, item.ready.microbatch);
        if let Schedule::List(list) = &self.plan.schedule {
            self.progress.listed = list.after(&item.ready, self.listed(&self.progress));
        }
        let unit = self.unit_of(&item.ready, &item.subject);
        let request = match &item.subject {
            Subject::Request(request) => Some(request.as_ref()),
            _ => None,
        };
        if let Some(order) = &mut self.order {
            order.grants(unit, request);
        }
    }

    /// A forward that this worker serves will have no backward and no close.
    pub fn ends_with_forward(&mut self, worker: WorkerId) -> Result<(), ServerError> {
        self.require_turn(worker, "ends_with_forward")?;
        let task = self.workers[worker.0 as usize].task;
        if let Some(order) = &mut self.order
            && let Some(task) = task
            && let Some(key) = task.request
        {
            order.ends_with_forward(task.microbatch, key);
        }
        Ok(())
    }

    /// A worker asks another rank for something.
    pub(super) fn order_asks(&mut self, worker: Option<WorkerId>, id: RequestId, about: &About) {
        if let Some(microbatch) = worker.and_then(|worker| self.root_microbatch(worker))
            && let Some(order) = &mut self.order
        {
            order.root_asks(id, about, microbatch);
        }
    }

    /// The microbatch whose step function a worker runs.
    fn root_microbatch(&self, worker: WorkerId) -> Option<MicrobatchId> {
        let task = self.workers.get(worker.0 as usize)?.task?;
        (task.kind == TraceKind::Root).then_some(task.microbatch)
    }

    /// Fails a step whose program wants next what the model will not ask for.
    pub(super) fn check_fit(&mut self, now: Duration) {
        let Some(order) = &self.order else { return };
        let asked = |microbatch| {
            self.ready.iter().any(|item| {
                item.ready.microbatch == microbatch
                    && matches!(
                        item.ready.kind,
                        ReadyKind::RequestBackward | ReadyKind::RequestClose
                    )
            })
        };
        if let Some(why) = order.misfit(asked) {
            let why = format!("{why}, so that what the program wants can never come");
            self.fail_order(&why, now);
        }
    }

    /// Fails a step in which nothing moves anywhere while this rank holds something back for its program.
    pub(super) fn check_held(&mut self, now: Duration) {
        let timeout = self.config.stall_report.min(self.config.stall_timeout);
        let quiet = self.stall.quiet(now);
        if self.turn == Turn::Free && quiet >= timeout && self.first_held().is_some() {
            let why = format!(
                "nothing in the job has made progress for {:.1} s, so that what the program wants does not come",
                quiet.as_secs_f64()
            );
            self.fail_order(&why, now);
        }
    }

    fn fail_order(&mut self, why: &str, now: Duration) {
        let mut message = format!(
            "the model does not fit the program in {}: rank {}{}; {why}",
            self.step_text(),
            self.config.rank,
            self.order_text(),
        );
        let mut about = None;
        if let Some((item, unit)) = self.first_held() {
            let module = self.item_module(item);
            let phase = if item.ready.kind == ReadyKind::WeightGradient {
                "weight gradients"
            } else if item.ready.kind.is_backward() {
                "backward"
            } else {
                "forward"
            };
            let place = self.order.as_ref().map(|order| order.place_text(unit));
            let held = format!(
                "; held back meanwhile: {phase} of {module} for microbatch {} ({})",
                unit.microbatch,
                place.unwrap_or_default()
            );
            message += &held;
            about = Some((module, unit.microbatch));
        }
        let mut failure = self.own_failure(FailureKind::Stall, "StallError", message, None);
        if let Some((module, microbatch)) = about {
            failure.report.module = Some(module);
            failure.report.microbatch = Some(microbatch);
        }
        self.fail_with(failure, true, now);
    }

    /// Where this rank stands in its program, for messages.
    pub(super) fn order_text(&self) -> String {
        let order = self.order.as_ref();
        order.map_or_else(String::new, |order| format!(" {order}"))
    }

    fn item_module(&self, item: &ReadyItem) -> String {
        let module = match &item.subject {
            Subject::Request(request) => {
                let module = request.work.module();
                module.map(|module| (request.model, module))
            }
            Subject::WeightGradient(deferred) => deferred.model.zip(deferred.module),
            Subject::Root | Subject::Worker(_) => None,
        };
        module.map_or_else(
            || "the step function".to_owned(),
            |(model, module)| format!("module {:?}", self.module_name(model, module)),
        )
    }

    /// What is held back of what is ready, the first in the program.
    pub(super) fn first_held(&self) -> Option<(&ReadyItem, StagePart)> {
        let held = self.ready.iter().filter_map(|item| {
            match self.standing_of(&item.ready, &item.subject) {
                Standing::Held(unit) => Some((item, unit)),
                Standing::Free | Standing::Next => None,
            }
        });
        held.min_by_key(|(_, unit)| self.order.as_ref().map(|order| order.place(*unit)))
    }

    fn go_on(&mut self) {
        let ready = &self.ready;
        if let Some(order) = &mut self.order {
            let waiting: Vec<StagePart> = ready
                .iter()
                .filter_map(|item| match &item.subject {
                    Subject::WeightGradient(deferred) => order.weight_unit(deferred.token),
                    _ => None,
                })
                .collect();
            order.go_on(|unit| waiting.contains(&unit));
        }
    }

    fn standings(&self) -> Vec<(Ready, Standing)> {
        self.eligible()
            .map(|(_, item)| (item.ready, self.standing_of(&item.ready, &item.subject)))
            .collect()
    }

    fn standing_of(&self, ready: &Ready, subject: &Subject) -> Standing {
        match &self.order {
            // Behind the root's word that the step is over, nothing more will come.
            Some(order) if self.stage == Stage::Running && self.end_body.is_none() => {
                order.standing(self.unit_of(ready, subject))
            }
            _ => Standing::Free,
        }
    }

    /// Which unit of the program an item is.
    fn unit_of(&self, ready: &Ready, subject: &Subject) -> Option<StagePart> {
        let order = self.order.as_ref()?;
        match subject {
            Subject::Root => order.root_unit(ready.kind, ready.microbatch),
            Subject::Request(request) => order.request_unit(request),
            Subject::WeightGradient(deferred) => order.weight_unit(deferred.token),
            Subject::Worker(worker) => {
                let microbatch = self.root_microbatch(*worker)?;
                order.root_unit(ready.kind, microbatch)
            }
        }
    }
}
