//! A ready backward first, else the next forward.

use super::Rules;
use crate::ready::{Progress, Ready, ReadyKind};

pub(super) struct Policy;

impl Rules for Policy {
    fn allows(&self, item: &Ready, progress: &Progress, active: u32) -> bool {
        item.kind != ReadyKind::RootForward || progress.active() < active
    }

    fn fills_once(&self, busy: u32, active: u32) -> bool {
        active >= busy
    }
}
