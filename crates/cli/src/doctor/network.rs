//! Connections and names of hosts.

use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::sync_channel;
use std::thread::Builder;

use rustix::system::uname;

use super::TIMEOUT;
use crate::report::Check;

/// Whether a process of this host reaches another one by TCP.
pub(super) fn loopback() -> Check {
    match exchange() {
        Ok(()) => Check::ok("tcp", "127.0.0.1 can be bound and reached").required(),
        Err(error) => Check::missing(
            "tcp",
            format!("127.0.0.1 cannot be bound and reached: {error}"),
            "bring the loopback interface up (ip link set lo up), and let the firewall pass it",
        )
        .required(),
    }
}

fn exchange() -> io::Result<()> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let mut caller = TcpStream::connect_timeout(&listener.local_addr()?, TIMEOUT)?;
    // The call was answered by the system, so it waits in the listener's queue.
    let (mut accepted, _) = listener.accept()?;
    accepted.set_read_timeout(Some(TIMEOUT))?;
    caller.write_all(b"?")?;
    accepted.read_exact(&mut [0])
}

/// The addresses of this host's own name, and of others.
pub(super) fn names(others: &[String]) -> Vec<Check> {
    let own = uname().nodename().to_string_lossy().into_owned();
    let mut checks = vec![judge(&own, resolve(&own), true)];
    checks.extend(others.iter().map(|name| judge(name, resolve(name), false)));
    checks
}

/// Looks a name up; the system's own look-up has no deadline, so a thread does it.
fn resolve(name: &str) -> Result<Vec<IpAddr>, String> {
    let (tell, told) = sync_channel(1);
    let asked = name.to_owned();
    Builder::new()
        .name("sw-resolve".to_owned())
        .spawn(move || {
            let found = (asked.as_str(), 0_u16).to_socket_addrs();
            let found = found.map(|all| all.map(|address: SocketAddr| address.ip()).collect());
            // Nobody listens any more when it took too long.
            tell.send(found).ok();
        })
        .map_err(|error| error.to_string())?;
    match told.recv_timeout(TIMEOUT) {
        Ok(found) => found.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no answer within {} s", TIMEOUT.as_secs())),
    }
}

fn judge(name: &str, addresses: Result<Vec<IpAddr>, String>, own: bool) -> Check {
    const TITLE: &str = "host name";
    let in_hosts = format!("enter {name} in /etc/hosts or the name service");
    let mut addresses = match addresses {
        Ok(addresses) if !addresses.is_empty() => addresses,
        nothing => {
            let problem = nothing.err().unwrap_or_else(|| "no address".to_owned());
            let found = format!("{name} is not known: {problem}");
            return if own {
                let advice = format!("{in_hosts}; it matters only for a job on several hosts");
                Check::warn(TITLE, found, advice)
            } else {
                Check::missing(TITLE, found, in_hosts).required()
            };
        }
    };
    addresses.sort_unstable();
    addresses.dedup();
    let shown: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    let found = format!("{name} is {}", shown.join(", "));
    if addresses.iter().all(IpAddr::is_loopback) && own {
        let advice = "nothing on one host; for a job on several, set MASTER_ADDR to an address that the others reach";
        return Check::warn(TITLE, found, advice);
    }
    Check::ok(TITLE, found)
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::{judge, loopback, resolve};
    use crate::report::CheckStatus;

    #[test]
    fn the_loopback_interface_is_required_and_here() {
        let check = loopback();
        assert_eq!((check.status, check.required), (CheckStatus::Ok, true));
    }

    #[test]
    fn an_address_is_its_own_name() {
        let found = resolve("127.0.0.1").unwrap();
        assert_eq!(found, [IpAddr::V4(Ipv4Addr::LOCALHOST)]);
    }

    #[test]
    fn only_a_host_that_was_asked_for_must_be_known() {
        let local = vec![IpAddr::V4(Ipv4Addr::LOCALHOST)];
        let outer = vec![IpAddr::V4(Ipv4Addr::new(10, 0, 0, 1)); 2];
        let unknown = || Err("unknown".to_owned());
        for (addresses, own, status, required) in [
            (Ok(outer.clone()), true, CheckStatus::Ok, false),
            (Ok(outer), false, CheckStatus::Ok, false),
            (Ok(local), true, CheckStatus::Warn, false),
            (unknown(), true, CheckStatus::Warn, false),
            (unknown(), false, CheckStatus::Missing, true),
            (Ok(Vec::new()), false, CheckStatus::Missing, true),
        ] {
            let check = judge("node-1", addresses, own);
            assert_eq!(
                (check.status, check.required),
                (status, required),
                "{check:?}"
            );
        }
    }
}
