//! What callers may take answers to be before they are there (static mode), and whether results stay where they are
//! made. Pure: whoever makes a call tells what it is and what it gave, and is told how to make the next one.

use std::collections::HashMap;
use std::sync::Arc;

use shardwright_core::{ModelId, ModuleId};

use crate::machine::Expected;

/// So many kinds of arguments are remembered for a call; more vary too much for what they give to be known.
const MOST_RECORDS: usize = 16;

/// After so many restarts nothing is predicted any more.
const MOST_RESTARTS: u32 = 8;

/// What a job's configuration says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictionRules {
    /// Whether results stay where they are made until somebody asks for them.
    pub handles: bool,
    /// Whether those of predicted calls do in any case.
    pub fast: bool,
    /// Whether calls are remembered, and predicted.
    pub learns: bool,
    /// For so many steps a call must have given the same.
    pub static_steps: u64,
}

/// A call of a step function, alike for all microbatches and steps.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SiteKey {
    /// The module that makes it; `None` for the step function itself.
    pub caller: Option<String>,
    /// Its number there.
    pub number: u32,
    /// The model.
    pub model: ModelId,
    /// The modules that it asks for one after another, each with the children to run.
    pub asked: Vec<(ModuleId, Option<(u32, u32)>)>,
    /// Under which state it is made: modes, one after another.
    pub modes: Vec<bool>,
    /// And the types in which it computes, by device.
    pub autocast: Vec<(String, String, bool)>,
}

/// A call, as [`Predictions`] knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SiteId(pub u32);

/// How to make a call.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// What each of its requests will be answered with; `None` where the caller has to wait.
    pub answers: Option<Vec<Arc<Expected>>>,
    /// Whether the results' tensors stay where they are made until somebody asks for them.
    pub hold: bool,
}

/// What a call gave for arguments of one description.
#[derive(Debug)]
struct Record {
    given: Arc<Expected>,
    answers: Vec<Arc<Expected>>,
    /// The step in which it was seen first.
    since: u64,
    /// Whether it has always given the same.
    is_steady: bool,
}

/// What is known of a call from earlier steps and microbatches.
#[derive(Debug, Default)]
struct Site {
    /// The first step in which the caller used results' values itself. In later ones they come with the answer; within
    /// a step nothing changes, for a result that comes in one message would overtake an earlier microbatch's that comes
    /// in two.
    wanted: Option<u64>,
    /// Whether a module changed what it keeps: the caller then waits until that is done.
    is_ordered: bool,
    records: Vec<Record>,
}

/// What is known of all calls, and how far that is relied on.
#[derive(Debug)]
pub struct Predictions {
    rules: PredictionRules,
    /// The calls of each step function.
    known: HashMap<String, HashMap<SiteKey, SiteId>>,
    sites: Vec<Site>,
    step: u64,
    function: String,
    predicts: bool,
    restarts: u32,
}

impl Predictions {
    /// Nothing is known yet.
    pub fn new(rules: PredictionRules) -> Self {
        Self {
            rules,
            known: HashMap::new(),
            sites: Vec::new(),
            step: 0,
            function: String::new(),
            predicts: true,
            restarts: 0,
        }
    }

    /// Whether calls are remembered.
    pub fn learns(&self) -> bool {
        self.rules.learns
    }

    /// Whether callers may go on before answers are there.
    pub fn predicts(&self) -> bool {
        self.rules.learns && self.predicts && self.restarts < MOST_RESTARTS
    }

    /// Ranks that have to predict the same calls have come to know them at different times: all that is known counts as
    /// seen in this step for the first time. Whether anything is predicted after that, which is not where they part again and
    /// again.
    pub fn restart(&mut self) -> bool {
        self.restarts += 1;
        let records = self.sites.iter_mut().flat_map(|site| &mut site.records);
        for record in records {
            record.since = self.step;
        }
        self.restarts < MOST_RESTARTS
    }

    /// A step begins; in one that is run again after a departure nothing is predicted.
    pub fn begin_step(&mut self, step: u64, function: &str, predicts: bool) {
        self.step = step;
        self.predicts = predicts;
        if self.function != function {
            function.clone_into(&mut self.function);
        }
    }

    /// A call of the step function that runs.
    pub fn site(&mut self, key: SiteKey) -> SiteId {
        if !self.known.contains_key(&self.function) {
            self.known.insert(self.function.clone(), HashMap::new());
        }
        let known = self.known.get_mut(&self.function);
        let known = known.expect("it has just been looked up");
        let next = SiteId(self.sites.len() as u32);
        let site = *known.entry(key).or_insert(next);
        if site == next {
            self.sites.push(Site::default());
        }
        site
    }

    /// How to make a call with these arguments; `None` where they are not to be remembered, or somebody wants to see
    /// (`observed`) what comes of it.
    pub fn predict(&self, site: SiteId, given: Option<&Expected>, observed: bool) -> Prediction {
        let site = &self.sites[site.0 as usize];
        let answers = given.and_then(|given| self.answers(site, given));
        let comes = site.wanted.is_some_and(|step| step != self.step);
        let stays = self.rules.handles || (answers.is_some() && self.rules.fast);
        Prediction {
            answers,
            hold: stays && !comes && !observed,
        }
    }

    fn answers(&self, site: &Site, given: &Expected) -> Option<Vec<Arc<Expected>>> {
        if !self.predicts() || site.is_ordered {
            return None;
        }
        let record = site.records.iter().find(|record| *record.given == *given)?;
        let is_known = record.is_steady && self.step - record.since >= self.rules.static_steps;
        is_known.then(|| record.answers.clone())
    }

    /// Remembers what a call has given.
    pub fn learn(&mut self, site: SiteId, given: Arc<Expected>, answers: Vec<Arc<Expected>>) {
        let records = &mut self.sites[site.0 as usize].records;
        if let Some(record) = records.iter_mut().find(|record| record.given == given) {
            record.is_steady &= record.answers.len() == answers.len();
            for (known, answer) in record.answers.iter_mut().zip(&answers) {
                record.is_steady &= known.is_like(answer);
                if !known.kind.keeps_all_of(&answer.kind) {
                    Arc::make_mut(known).kind.keep_all_of(&answer.kind);
                }
            }
        } else if records.len() < MOST_RECORDS {
            records.push(Record {
                given,
                answers,
                since: self.step,
                is_steady: true,
            });
        }
    }

    /// The caller uses the values of a result that is elsewhere.
    pub fn wants(&mut self, site: SiteId) {
        let site = &mut self.sites[site.0 as usize];
        site.wanted.get_or_insert(self.step);
    }

    /// The call has changed what a module keeps: from now on its caller waits for it.
    pub fn set_ordered(&mut self, site: SiteId) {
        self.sites[site.0 as usize].is_ordered = true;
    }
}
