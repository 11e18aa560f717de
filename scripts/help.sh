# shellcheck shell=bash
# -h or --help anywhere among a script's arguments prints the comment at the script's head and exits before anything is
# done. Sourced first, while the path by which the script was called is still right.
for argument in "$@"; do
  case $argument in
    -h | --help)
      sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
      if declare -F more_help >/dev/null; then more_help; fi
      exit 0
      ;;
  esac
done
unset argument
