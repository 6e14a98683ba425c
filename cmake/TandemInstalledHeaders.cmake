# Runs at installation, behind that of headers: they include each other below tandem/.
file(GLOB_RECURSE headers "$ENV{DESTDIR}${header_dir}/*.hpp")
foreach(header ${headers})
  file(READ ${header} text)
  string(REGEX REPLACE "#include \"(core|scheduler|offload|api)/" "#include \"tandem/\\1/" text "${text}")
  file(WRITE ${header} "${text}")
endforeach()
