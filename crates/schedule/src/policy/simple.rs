//! The forward of every microbatch before the backward of any.

use super::Rules;
use crate::ready::{Progress, Ready, ReadyKind};

pub(super) struct Policy;

impl Rules for Policy {
    fn allows(&self, item: &Ready, progress: &Progress, _: u32) -> bool {
        item.kind != ReadyKind::RootBackward || progress.forwards_done == progress.num_microbatches
    }

    fn fills_once(&self, _: u32, _: u32) -> bool {
        true
    }
}
